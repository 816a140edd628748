"""DPO and GRPO steps in the times of an H100, on published lengths: ours, copies of prompts, static meshes, packing.

    python scripts/bench/cluster/virtual/rollouts.py --lengths conversation_trace.jsonl
    python scripts/bench/cluster/virtual/rollouts.py --lengths conversation_trace.jsonl --page

The lengths are Mooncake's trace, FAST25-release/traces/conversation_trace.jsonl of
https://github.com/kvcache-ai/Mooncake, which is not part of this project. Results are kept in a file, and a second
start runs what is missing. ``--page`` writes docs/results/rollouts.md from the file.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[4]))  # so that it also runs as a file

import numpy as np

from bytescale_ext.data.corpus import sidecar
from bytescale_ext.new_file import new_file, write_text
from scripts.bench.cluster.virtual.bench import CaseResult, Results, replay_arm
from scripts.bench.cluster.virtual.cases import SCALE, Arm, Case
from scripts.bench.cluster.virtual.rank import COPIES, EQUAL
from scripts.bench.cluster.virtual.recording import Recording
from scripts.bench.cluster.virtual.times import DeviceTimes
from scripts.bench.progress import progress
from scripts.bench.report import ROOT
from scripts.cluster.ranks import preload

FOLDER: Final = ROOT / "runs" / "cluster" / "rollouts"
PAGE: Final = ROOT / "docs" / "results" / "rollouts.md"
STEPS: Final = 3


@dataclass(frozen=True)
class GroupCase(Case):
    """Groups of documents on a cluster.

    Attributes:
        loss: value of ``--loss``.
        size: documents of a group.
        num_groups: groups of a step.
    """

    num_nodes: int = 2
    ranks_per_node: int = 4
    context: int = 131072
    loss: str = "grpo"
    size: int = 8
    num_groups: int = 16

    def __str__(self) -> str:
        name = "DPO" if self.loss == "dpo" else f"GRPO, {self.size} answers"
        return f"{name}, {self.num_ranks} GPUs"


class WholeArm(Arm):
    """An arm whose ranks hold the longest document each."""

    def tokens_per_rank(self, case: Case) -> int:
        """Return C, modelled tokens."""
        return case.context


_OFF: Final = ("--hdp-hierarchical-rings", "off")
ARMS: Final = {
    "ours": Arm("hybrid data parallelism, prompts once where it pays", ("--hdp-hierarchical-rings", "auto")),
    COPIES: Arm("hybrid data parallelism, copies of prompts", ("--hdp-hierarchical-rings", "auto"), megatrons=COPIES),
    "static": Arm("static context parallelism over all ranks", _OFF, -1, COPIES),
    "equal": WholeArm("data parallelism, equal counts of documents, C = 128K", _OFF, megatrons=EQUAL),
}
CASES: Final = (
    (GroupCase("mooncake"), tuple(ARMS)),
    (GroupCase("mooncake", loss="dpo", size=2, num_groups=32), tuple(ARMS)),
    (GroupCase("mooncake", size=16, num_groups=8), ("ours", COPIES)),
)
"""Cases and their arms, ours first."""


@dataclass(frozen=True)
class Trace:
    """Published tokens of prompts and answers: [n] each."""

    prompts: np.ndarray
    answers: np.ndarray

    @classmethod
    def read(cls, path: Path) -> Trace:
        """Return the lengths of a trace, JSON lines with ``input_length`` and ``output_length``."""
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        columns = [np.array([line[key] for line in lines]) for key in ("input_length", "output_length")]
        return cls(*columns)

    def groups(self, case: GroupCase, num_groups: int, seed: int) -> list[tuple[int, tuple[int, ...]]]:
        """Return the recorded tokens of the prompt and of each answer of some groups, without replacement.

        The first answer follows the prompt in the trace. The other answers have lengths of other conversations.
        """
        random = np.random.default_rng(seed)
        fits = np.flatnonzero(self.prompts + self.answers.max() <= case.context)
        found = []
        for one in random.choice(fits, num_groups, replace=False).tolist():
            others = random.choice(self.answers, case.size - 1).tolist()
            answers = tuple(max(1, round(length / SCALE)) for length in (int(self.answers[one]), *others))
            found.append((max(2, round(int(self.prompts[one]) / SCALE)), answers))
        return found


@dataclass(frozen=True)
class GroupRecording(Recording):
    """Recording of groups; ``trace``: their lengths."""

    trace: Trace | None = None

    def documents(self, case: Case) -> tuple[Path, int]:
        """Write the groups of a case with all sidecars; return their prefix and the number of groups in a step."""
        assert isinstance(case, GroupCase) and self.trace is not None
        prefix = self.folder / f"{case.loss}-{case.size}-{case.num_groups}-{self.num_steps}-{self.seed}"
        if not prefix.with_suffix(".idx").exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            groups = self.trace.groups(case, case.num_groups * self.num_steps, self.seed)
            write_groups(prefix, groups, self.seed)
        return prefix, case.num_groups

    def command(self, case: Case, arm: Arm, folder: Path) -> tuple[str, ...]:
        """Return the command of every rank."""
        assert isinstance(case, GroupCase)
        prefix, _ = self.documents(case)
        words = ("--sft", "--loss", case.loss, "--reference-logprobs", f"{prefix}.base")
        return (*super().command(case, arm, folder), *words)


def write_groups(prefix: Path, groups: Sequence[tuple[int, Sequence[int]]], seed: int) -> None:
    """Write groups of random tokens: equal prompts, masks of answers, advantages, old and reference log-probabilities.

    ``groups``: tokens of the prompt and of each answer of each group.
    """
    from megatron.bytescale.core.datasets.corpus import write_tokens

    random, documents, masks, numbers, advantages = np.random.default_rng(seed), [], [], [], []
    for number, (prompt, answers) in enumerate(groups):
        shared = random.integers(0, 256, prompt)
        for answer in answers:
            documents.append(np.concatenate([shared, random.integers(0, 256, answer)]))
            masks.append(np.arange(prompt + answer) >= prompt)
            numbers.append(number)
            advantages.append(np.full(prompt + answer, random.normal(), dtype=np.float32))
    write_tokens(prefix, documents)
    name, num_tokens = str(prefix), sum(map(len, documents))
    expected = np.full(num_tokens, -np.log(257), dtype=np.float32)
    columns = (
        (sidecar.weights_of(name), sidecar.WEIGHTS, np.concatenate(masks).view(np.uint8)),
        (sidecar.groups_of(name), sidecar.GROUPS, np.array(numbers, dtype=np.int32)),
        (sidecar.advantages_of(name), sidecar.ADVANTAGES, np.concatenate(advantages)),
        (sidecar.old_logprobs_of(name), sidecar.LOGPROBS, expected),
        (f"{name}.base", sidecar.LOGPROBS, expected),
    )
    for path, kind, values in columns:
        with new_file(path + ".bin", is_binary=True) as stream:
            stream.write(values.tobytes())
        sidecar.write_header(path, name, kind, values.dtype.name)


def run_all(recording: GroupRecording, results: Results) -> None:
    """Run the missing arms of all cases."""
    missing = [(case, arm) for case, arms in CASES for arm in arms if arm not in results.cases.get(str(case), {})]
    for case, arm in progress(missing, lambda turn: f"{turn[0]}: {turn[1]}"):
        folder = recording.folder / f"{case.loss}-{case.size}" / arm
        result, _ = replay_arm(recording, case, ARMS[arm], folder)
        results.cases.setdefault(str(case), {})[arm] = result
        results.write()


def table(arms: CaseResult) -> list[str]:
    """Return the lines of the table of a case: an arm in each row."""
    links = list(next(iter(arms.values()))["steps"])
    lines = [
        "| arm | tokens computed | " + " | ".join(f"seconds a step, {one} Gbit/s | ours is" for one in links) + " |",
        "|" + "---|" * (2 + 2 * len(links)),
    ]
    ours = arms["ours"]["steps"]
    for name, arm in arms.items():
        cells = [ARMS[name].title, f"{sum(arm['tokens']):,}"]
        for one in links:
            seconds = [step["seconds"] for step in arm["steps"][one]]
            ratios = sorted(mine / own["seconds"] for mine, own in zip(seconds, ours[one], strict=True))
            faster = "" if name == "ours" else f"{ratios[0]:.2f}x to {ratios[-1]:.2f}x"
            cells += [f"{statistics.mean(seconds):.2f}", faster]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def largest_difference(cases: Mapping[str, CaseResult]) -> float:
    """Return the largest relative difference of a loss from the loss of ours in the same step."""
    return max(
        abs(loss - own) / abs(own)
        for arms in cases.values()
        for arm in arms.values()
        for loss, own in zip(arm["losses"], arms["ours"]["losses"], strict=True)
    )


def minutes(cases: Mapping[str, CaseResult]) -> float:
    """Return the minutes that all arms took."""
    return float(sum(arm["minutes"] for arms in cases.values() for arm in arms.values()))


def times_over_copies(cases: Mapping[str, CaseResult]) -> tuple[float, float]:
    """Return the lowest and highest mean time of plain data parallelism over the mean time of ours with copies."""
    ratios = [
        statistics.mean(step["seconds"] for step in arms["equal"]["steps"][links])
        / statistics.mean(step["seconds"] for step in steps)
        for arms in cases.values()
        if "equal" in arms
        for links, steps in arms[COPIES]["steps"].items()
    ]
    return min(ratios), max(ratios)


def page(results: Results) -> str:
    """Return the text of the page."""
    low, high = times_over_copies(results.cases)
    of_cases = "\n\n".join(f"## {case}\n\n" + "\n".join(table(arms)) for case, arms in results.cases.items())
    return _TEXT.format(
        minutes=minutes(results.cases),
        difference=largest_difference(results.cases),
        tables=of_cases,
        steps=STEPS - 1,
        low=low,
        high=high,
    )


_TEXT: Final = """# Preferences and rollouts in the times of a GPU

This page is written by one command; do not edit it:

    python scripts/bench/cluster/virtual/rollouts.py --lengths conversation_trace.jsonl --page

Every figure on this page is **emulated with device times** of an H100, [as described here](cluster.md). Nothing was
measured on a GPU.

    python scripts/bench/cluster/virtual/rollouts.py --lengths conversation_trace.jsonl

The results took {minutes:.0f} minutes on two cores that other work shared. {steps} steps of seed 0 count. Arms train on
the same documents, so ratios of step times are ratios of tokens per second. The losses of the arms differ by
{difference:.0e} at most (relative).

- Documents have lengths of [Mooncake's trace](https://github.com/kvcache-ai/Mooncake), 12,031 conversations with 12,035
  tokens in a prompt and 343 in an answer, in the mean. Recorded lengths are 1:32. Documents have at most 128K tokens.
- The trace has one answer for each prompt. The other answers of a group have the lengths of answers to other prompts of
  the trace, drawn at random. No public rollouts of a reasoning model were at hand. Their answers are longer, and
  prompts that are computed once then save less.
- GRPO has 16 groups a step with 8 answers, and 8 groups with 16 answers. DPO has 32 pairs, and two passes a step. Both
  read a reference model from a sidecar.
- Two nodes of 4 GPUs, C = 16K. Plain data parallelism needs C = 128K, so that the longest document fits on one rank;
  the memory for it is not modelled. Each rank gets equally many documents of about equal work
  ([our function](../guide/library.md) in place of verl's balancer), in packs of at most C tokens.
- Static meshes and plain data parallelism have copies of prompts, as their frameworks do. The difference between the
  first two rows is the gain of prompts that are computed once. The other rows, compared with the second, show the gain
  of the plan.

Plain data parallelism takes {low:.2f} to {high:.2f} times as long as ours with copies, with 8 times as many tokens on a
rank. It needs no rings.

*tokens computed*: of all counted steps, without padding. *ours is*: how many times as fast our step with prompts
computed once is, from the lowest to the highest step.

{tables}
"""


def main() -> None:
    """Run the missing arms and print the tables."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--lengths", type=Path, required=True, help=".jsonl with input_length and output_length")
    parser.add_argument("--results", type=Path, default=FOLDER / "h100.json", help="file of the results")
    parser.add_argument("--page", action="store_true", help="write the page from the results, and run nothing")
    args = parser.parse_args()
    device = DeviceTimes.read("h100")
    setting: dict[str, Any] = {"device": device.name, "source": device.source, "steps": STEPS, "seed": 0}
    results = Results.open(args.results, setting)
    if args.page:
        write_text(PAGE, page(results))
        return
    trace = Trace.read(args.lengths)
    preload()
    run_all(GroupRecording(args.results.resolve().parent / "recordings", device, STEPS, trace=trace), results)
    for case, arms in results.cases.items():
        print("\n".join((f"{case}, emulated with device times of {device.name}", *table(arms), "")))


if __name__ == "__main__":
    from scripts.bench.cluster.virtual import rollouts  # ranks unpickle values of a module with a name

    rollouts.main()
