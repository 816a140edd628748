"""Measure hybrid data parallelism against its alternatives on an emulated cluster: real training, TCP, scaled lengths.

    sudo .venv/bin/python scripts/bench/cluster/speed.py --quick [--json]         # about 15 minutes on 2 cores
    sudo .venv/bin/python scripts/bench/cluster/speed.py [--rounds 2]             # all cases: hours
    sudo .venv/bin/python scripts/bench/cluster/speed.py --cases "byted 1x8 0.4"  # lengths, nodes x ranks, links
    .venv/bin/python scripts/bench/cluster/page.py                                # writes docs/results/measured.md
    .venv/bin/python scripts/bench/cluster/speed.py --device-times h100 --quick   # in virtual time, see the end

All arms train the same small model on the same documents in the same steps. Lengths follow a published distribution,
1:32: a context of 16K tokens with C = 2K represents 512K with 64K. Documents of fewer than 128 tokens are joined, so
ranks compute more than they launch. Each rank has a fixed share of a core and its own network interface
(``scripts/cluster/emulate.py``), so the time of a waiting rank is lost, as on a GPU.

First ``bytescale profile`` measures the ranks on unlimited links. The profile gives the matched links, which have the
ratio of bytes to computing of an H200 with 400 Gbit/s (``scripts/cluster/spec.py``), and the predicted times. Arms with
a planner get the profile as ``--cost-file``. Then every case runs its arms (``cases.py``), every other round in
reverse. The first step of a run does not count. Results are written after each run, so a second start continues where
the first ended.

Only the ratio of two arms in one run can be compared.

With ``--device-times`` time is virtual. Every rank runs the same training, on CPU, with a model of one layer for each
stage and lengths 1:32, and records what a GPU would be told (``virtual/record.py``). A replay (``virtual/replay.py``)
gives each kernel the time that it takes for a 7B model on the named device, each launch its host time, and each message
its share of the links. The figures are the same on every machine.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # so that it also runs as a file

from bytescale_ext.draw.timeline import draw_timelines
from bytescale_ext.measure.cost_file import read_cost, write_cost
from bytescale_ext.measure.timeline import COMPUTE_KINDS, Phase, read_phases
from bytescale_ext.plan.cost.model_cost import ModelCost
from scripts.bench.cluster.cases import (
    ARMS,
    CONTEXT,
    FULL,
    QUICK,
    SCALE,
    SHORTEST,
    STEP_TOKENS,
    TOKENS_PER_RANK,
    Arm,
    Case,
    Planned,
    with_names,
)
from scripts.bench.cluster.figures import all_figures, case_figures, table
from scripts.bench.cluster.predict import predicted_seconds, wall_cost
from scripts.bench.cluster.results import Results, Run, Step
from scripts.bench.cluster.virtual import command as virtual
from scripts.bench.progress import progress
from scripts.bench.report import ROOT, in_turns
from scripts.cluster.emulate import BEFORE_TRAINING, check_machine, run
from scripts.cluster.ranks import Launch, preload
from scripts.cluster.spec import SPECS, matched_links
from scripts.cluster.topology import Topology
from scripts.cluster.usage import Split

SPEC = "H200-IB"
TRACED_STEP = 3
PROFILED = Case("byted", 1, 8, "unlimited")
MODEL = (
    "--num-layers 2 --hidden-size 128 --ffn-hidden-size 352 --num-attention-heads 4 --group-query-attention "
    "--num-query-groups 2 --swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope "
    "--attention-dropout 0 --hidden-dropout 0 --tokenizer-type NullTokenizer --vocab-size 257 --cpu"
).split()
TRAIN = (
    "--lr 1e-3 --clip-grad 1.0 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
    "--log-interval 1 --log-throughput --eval-iters 0 --eval-interval 1000 --split 100,0,0"
).split()


@dataclass(frozen=True)
class Bench:
    """Settings of all cases.

    Attributes:
        folder: folder of all files.
        num_steps: steps of each run; the first does not count.
        seed: seed of lengths, tokens and order.
    """

    folder: Path
    num_steps: int
    seed: int

    @property
    def setting(self) -> dict[str, float]:
        """Settings that must be equal for results to be compared."""
        return {"steps": self.num_steps, "seed": self.seed, "tokens": STEP_TOKENS, "shortest": SHORTEST}

    def run_folder(self, case: Case, arm: str, number: int) -> Path:
        """Return the folder of a run."""
        return self.folder / str(case).replace(" ", "-").replace("/", "-") / f"{arm}-{number + 1}"

    def lengths(self, case: Case) -> list[int]:
        """Return the tokens of the documents of all steps of a case."""
        return case.lengths(self.num_steps, self.seed)

    def documents(self, case: Case) -> Path:
        """Return the prefix of the documents of a case: random tokens, written at the first call."""
        from megatron.bytescale.core.datasets.corpus import write_tokens

        name = f"documents-{case.sampler}-{case.context}-{case.num_ranks}-{self.num_steps}-{self.seed}"
        prefix = self.folder / name
        if not prefix.with_suffix(".idx").exists():
            random = np.random.default_rng(self.seed)
            write_tokens(prefix, (random.integers(0, 256, length) for length in self.lengths(case)))
        return prefix


def profile_ranks(topology: Topology, model: Sequence[str], max_tokens: int, folder: Path) -> ModelCost:
    """Profile a model, given by its flags, on all ranks of a cluster with micro-batches of up to ``max_tokens``.

    Raises:
        RuntimeError: the profile failed; the message holds the end of its log.
    """
    output = folder / "cost.json"
    words = ("--output", output, "--max-tokens", max_tokens, "--repeats", 3, "--", *model)
    command = (str(Path(sys.executable).parent / "bytescale"), "profile", *map(str, words))
    launch = Launch(command, folder, "", 1800.0, is_warm=True)
    shutil.rmtree(folder, ignore_errors=True)
    if run(topology, launch).code:
        raise RuntimeError(f"the profile failed:\n{launch.log(0).read_text(errors='replace')[-2000:]}")
    return read_cost(output)


def launch_of(bench: Bench, case: Case, arm: Arm, cost: ModelCost, folder: Path) -> Launch:
    """Return the training of an arm, which plans with ``cost`` in wall time."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_cost(folder / "cost.json", cost)
    flags = [*MODEL, *TRAIN, "--hybrid-data-parallel", *arm.words(case), "--cost-file", folder / "cost.json"]
    flags += ["--seq-length", case.context, "--max-position-embeddings", case.context]
    flags += ["--data-path", bench.documents(case), "--global-batch-size", len(bench.lengths(case)) // bench.num_steps]
    flags += ["--train-iters", bench.num_steps, "--seed", 1 + bench.seed]
    flags += ["--hdp-log-dir", folder, "--tensorboard-dir", folder, "--hdp-timeline-step", TRACED_STEP]
    command = (str(ROOT / arm.script), *map(str, flags))
    return Launch(command, folder, BEFORE_TRAINING, 1800.0, is_warm=True)


def split_of(topology: Topology, launch: Launch) -> Split:
    """Run a training and return the shares of its time. Raises RuntimeError if it fails."""
    ended = run(topology, launch)
    if ended.code or ended.split is None:
        ranks = (topology.num_ranks - 1, 0)
        logs = "".join(launch.log(rank).read_text(errors="replace")[-1500:] for rank in ranks)
        raise RuntimeError(f"{launch.log_dir} ended with exit code {ended.code}:\n{logs.strip()}")
    return ended.split


def run_arm(bench: Bench, case: Case, arm_name: str, cost: ModelCost, folder: Path) -> Run:
    """Train one arm on the cluster. Raises RuntimeError if that fails."""
    arm, topology = ARMS[arm_name], case.topology(matched(cost))
    wall = wall_cost(cost, topology)
    split = split_of(topology, launch_of(bench, case, arm, wall, folder))
    phases = read_phases(folder / "timeline" / ("stage0" if arm.num_stages > 1 else ""), TRACED_STEP)
    predicted = predicted_seconds(arm, case, lengths_of(phases), wall)
    return Run(read_steps(folder), as_shares(split), predicted, computing_seconds(phases))


def matched(cost: ModelCost) -> tuple[float, float]:
    """Return Gbit/s inside and between nodes of the matched links of eight ranks."""
    links = matched_links(SPECS[SPEC], cost, PROFILED.topology((0.0, 0.0)).cores_per_rank, SCALE)
    return links.intra_gbps, links.inter_gbps


def read_steps(folder: Path) -> tuple[Step, ...]:
    """Return the logged figures of each step."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    names = ("tokens_per_second", "megabytes_sent_per_step", "measured_imbalance", "lm loss")
    return tuple(Step(*(line[name] for name in names)) for line in lines)


def as_shares(split: Split) -> dict[str, float]:
    """Return the figures of a split that results keep."""
    return {name: getattr(split, name) for name in ("computing", "sending", "other", "waiting", "between_bytes")}


def lengths_of(phases: tuple[Phase, ...]) -> list[int]:
    """Return the tokens of the documents of a traced step, in its order."""
    lengths = {shard.seq: shard.length for phase in phases for shard in phase.shards}
    return [lengths[seq] for seq in sorted(lengths)]


def computing_seconds(phases: tuple[Phase, ...]) -> float:
    """Return the time from the first forward pass of a step to the end of its last backward pass."""
    passes = [phase for phase in phases if phase.kind in COMPUTE_KINDS]
    return max(phase.stop for phase in passes) - min(phase.start for phase in passes)


def run_all(bench: Bench, results: Results, planned: tuple[Planned, ...], num_rounds: int) -> None:
    """Run the missing runs of some cases, every other round of arms in reverse."""
    preload()
    for _ in progress(["profile of the ranks"] if results.cost is None else []):
        unlimited = PROFILED.topology((0.0, 0.0))
        results.cost = profile_ranks(unlimited, MODEL, TOKENS_PER_RANK // 2, bench.folder / "profile")
        results.write()
    assert results.cost is not None
    print(matched_links(SPECS[SPEC], results.cost, PROFILED.topology((0.0, 0.0)).cores_per_rank, SCALE).text)
    turns = [(row.case, arm, number) for row in planned for number, arm in in_turns(row.arms, num_rounds)]
    for case, arm, _ in turns:
        if ARMS[arm].refusal(case):
            results.add(str(case), arm, ARMS[arm].refusal(case))
    missing = [turn for turn in turns if not ARMS[turn[1]].refusal(turn[0])
               and len(results.of(str(turn[0]), turn[1])) <= turn[2]]  # fmt: skip
    for case, arm, number in progress(missing, lambda turn: f"{turn[0]}: {turn[1]}, round {turn[2] + 1}"):
        try:
            run: Run | str = run_arm(bench, case, arm, results.cost, bench.run_folder(case, arm, number))
        except (RuntimeError, TimeoutError) as error:  # the other arms go on; the next start tries it again
            run = f"it failed: {str(error).splitlines()[-1]}"
            print(error, file=sys.stderr, flush=True)
        results.add(str(case), arm, run)


def draw(bench: Bench, results: Results, planned: Planned, path: Path) -> None:
    """Draw the traced steps of the first and the last arm of a case, one above the other."""
    steps = []
    for arm in dict.fromkeys((planned.arms[0], planned.arms[-1])):
        first = results.of(str(planned.case), arm)[0]
        title = (
            f"{ARMS[arm].title}: {first.steps[TRACED_STEP - 1].tokens_per_second:,.0f} tokens/s, "
            f"{first.split['waiting']:.0%} of the time lost to waiting"
        )
        steps.append((title, read_phases(bench.run_folder(planned.case, arm, 0) / "timeline", TRACED_STEP)))
    draw_timelines(steps, path)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round of the most informative cases")
    parser.add_argument("--cases", nargs="+", metavar="CASE",
                        help="run these cases, as 'byted 2x4 matched': lengths, nodes x ranks, links, which are "
                        "unlimited, fast, matched, slow, or Gbit/s inside and between nodes (4/0.4)")  # fmt: skip
    parser.add_argument(
        "--arms", nargs="+", choices={**ARMS, **virtual.ARMS}, help="run these arms, the first against the others"
    )
    parser.add_argument("--rounds", type=int, default=1, help="runs of each arm (%(default)s)")
    parser.add_argument(
        "--steps", type=int, default=4, help="steps of each run; the first does not count (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of lengths and tokens (%(default)s)")
    parser.add_argument("--device-times", metavar="NAME", help="train without the emulated cluster, and replay what "
                        "the ranks do in the times of a device: h100, h200, or a file of timings")  # fmt: skip
    parser.add_argument("--megatron", type=Path, metavar="PATH", help="source tree of Megatron's development branch, "
                        "whose dynamic context parallelism is the arm dynamic; needs --device-times")  # fmt: skip
    parser.add_argument("--results", type=Path, metavar="FILE",
                        help="file of results; logs are in its folder (runs/cluster/results.json, with --device-times "
                        "runs/cluster/virtual/NAME.json)")  # fmt: skip
    parser.add_argument("--plot", type=Path, metavar="FILE",
                        help=f"draw step {TRACED_STEP} of the first and last arm of the first case")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    return parser


def check(args: argparse.Namespace, planned: tuple[Planned, ...]) -> None:
    """Raise ValueError for settings that cannot run, before anything is written."""
    if args.rounds < 1 or args.steps < TRACED_STEP:
        raise ValueError(f"--rounds {args.rounds}, --steps {args.steps}: give 1 and {TRACED_STEP} or more")
    if args.plot is not None and not args.plot.parent.is_dir():
        raise ValueError(f"--plot {args.plot}: there is no directory {args.plot.parent}")
    for case in (row.case for row in planned):
        check_machine(case.topology((1.0, 1.0)))
        if case.context > case.num_ranks * TOKENS_PER_RANK:
            raise ValueError(
                f"{case}: documents of {case.context} tokens do not fit on {case.num_ranks} ranks of "
                f"C = {TOKENS_PER_RANK} tokens"
            )


def main() -> int:
    """Run the missing runs, print the tables and, with ``--json``, one JSON object as the last line."""
    args = build_parser().parse_args()
    try:
        if args.device_times is not None:
            virtual.run(args)
            return 0
        if args.megatron is not None:
            raise ValueError("--megatron: its plans run with --device-times only")
        planned = with_names(QUICK if args.quick else FULL, args.cases, args.arms)
        check(args, planned)
        path = args.results or ROOT / "runs" / "cluster" / "results.json"
        bench = Bench(path.resolve().parent, args.steps, args.seed)
        results = Results.open(path, bench.setting)
        run_all(bench, results, planned, args.rounds)
        if args.plot is not None:
            draw(bench, results, planned[0], args.plot)
    except (ValueError, RuntimeError) as error:
        print(f"speed.py: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    cases = results.cases([str(row.case) for row in planned])
    for case, arms in cases.items():
        print(table(case, case_figures(arms), results.refused(case)) + "\n")
    print(f"lengths 1:{SCALE}, context {CONTEXT}, C = {TOKENS_PER_RANK}, about {STEP_TOKENS:,} tokens a step")
    if args.json:
        print(json.dumps(all_figures(cases)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
