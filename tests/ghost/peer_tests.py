"""Run Megatron's own unit tests on ghost GPUs, without and with our patch rows, and compare the outcomes.

    make peer-tests MEGATRON=PATH                      # a source tree of NVIDIA/Megatron-LM, at the installed release
    .venv/bin/python -m tests.ghost.peer_tests PATH --minutes 15 --ranks 1 2 --only tensor_parallel

Each file of tests runs in processes of its own, first unpatched, then with the rows of each launch line of
``tests/ghost/patched.py``. The folder ``--output`` has the output and the outcomes of each file, ``outcomes.json`` and
``table.md``. Started again, the files that ended are not run again. Nothing of Megatron's tests is installed or kept.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bytescale_ext.new_file import write_text
from tests.ghost.environment import environment
from tests.ghost.peer import PeerFile, run_as_rank
from tests.harness import Devices, free_port

ROOT = Path(__file__).resolve().parents[2]
UNIT_TESTS = "tests/unit_tests"
CHOSEN = (
    "tensor_parallel", "pipeline_parallel", "distributed", "training", "optimizer", "test_parallel_state.py",
    "test_optimizer_param_scheduler.py", "test_optimizer.py", "test_training.py", "test_utils.py",
    "test_num_microbatches_calculator.py", "test_local_multi_tensor_fns.py", "test_wrap_model_chunks_with_ddp.py",
    "transformer/test_attention.py", "transformer/test_core_attention.py", "transformer/test_mlp.py",
    "transformer/test_transformer_block.py", "transformer/test_transformer_layer.py", "transformer/test_rope.py",
    "transformer/test_multi_latent_attention.py", "transformer/test_multi_token_prediction.py", "transformer/moe",
)  # fmt: skip
"""Files and folders that run by default: what our patch rows change, and what calls it."""
UNPATCHED = ""
PASSED, FAILED, SKIPPED, CUT = "passed", "failed", "skipped", "cut off"
GHOSTS = Devices(
    ("torch", "torch.distributed", "torch._dynamo", "numpy", "pytest", "tests.ghost.peer_preload"), "nccl", environment
)


@dataclass(frozen=True)
class Run:
    """One file, number of ranks, and launch line whose rows are installed ("" for none)."""

    path: str
    num_ranks: int
    launch: str

    @property
    def folder(self) -> str:
        """Folder of the file below Megatron's unit tests, or the name of a file that has none."""
        return str(Path(self.path).relative_to(UNIT_TESTS)).split("/")[0]

    @property
    def name(self) -> str:
        """Name of the folder of its results."""
        stem = self.path.removeprefix(UNIT_TESTS + "/").removesuffix(".py").replace("/", ".")
        return f"{stem}-{self.num_ranks}-{self.launch or 'unpatched'}"


@dataclass(frozen=True)
class Outcome:
    """Outcome of a test on all ranks, and why it failed, was skipped or was cut off."""

    outcome: str
    reason: str = ""


def files_of(tree: Path, chosen: Sequence[str]) -> list[str]:
    """Return the files of tests in some folders of a source tree. Raises ValueError for a name without tests."""
    found: dict[str, None] = {}
    for name in chosen:
        path = tree / UNIT_TESTS / name
        files = [path] if path.is_file() else sorted(path.rglob("test_*.py"))
        if not files:
            raise ValueError(f"{path} has no tests")
        found.update(dict.fromkeys(str(file.relative_to(tree)) for file in files))
    return list(found)


def start_server() -> None:
    """Start the server that the ranks are forked from; it imports Megatron first, which may take a minute."""
    process = multiprocessing.get_context("forkserver").Process(target=int)
    GHOSTS.start(process)
    process.join()


def run_file(run: Run, tree: Path, folder: Path, seconds: float) -> None:
    """Run a file, and end its ranks after ``seconds``."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    job = PeerFile(tree, run.path, run.num_ranks, run.launch, free_port())
    context = multiprocessing.get_context("forkserver")
    processes = [context.Process(target=run_as_rank, args=(job, rank, folder)) for rank in range(run.num_ranks)]
    end = time.monotonic() + seconds
    try:
        for process in processes:
            GHOSTS.start(process)
        for process in processes:
            process.join(max(0.0, end - time.monotonic()))
    finally:
        for process in processes:
            if process.pid is None:  # not started
                continue
            with contextlib.suppress(ProcessLookupError, PermissionError):  # processes that a rank has started
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()


def outcomes_of(run: Run, folder: Path) -> dict[str, Outcome]:
    """Return the outcome of each test: the worst of all ranks. A test that a rank never ended is cut off."""
    worst: dict[str, Outcome] = {}
    order = (PASSED, SKIPPED, FAILED, CUT)
    for rank in range(run.num_ranks):
        file = folder / f"rank{rank}.jsonl"
        lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        mine: dict[str, Outcome] = {}
        for line in lines:
            for test in line.get("tests", ()):
                mine[test] = Outcome(CUT, "an earlier test of the file did not end")
            if "test" in line:
                mine[line["test"]] = Outcome(CUT, "did not end") if line["outcome"] == "began" else outcome_of(line)
        if not mine:
            mine = {run.path: Outcome(CUT, "the file was not collected in time")}
        for test, outcome in mine.items():
            if test not in worst or order.index(outcome.outcome) > order.index(worst[test].outcome):
                worst[test] = outcome
    return worst


def outcome_of(line: dict[str, Any]) -> Outcome:
    """Return the outcome in a line of a rank's recorder."""
    return Outcome(line["outcome"], " ".join(line["reason"].split())[:160] if line["outcome"] != PASSED else "")


@dataclass(frozen=True)
class Results:
    """Outcomes of the runs that ended, and the runs that did not start."""

    outcomes: dict[Run, dict[str, Outcome]]
    not_started: list[Run]


def run_all(runs: Sequence[Run], tree: Path, output: Path, minutes: float, seconds: float) -> Results:
    """Run the files until the time is over. Outcomes of an earlier call are read, not run."""
    begun = time.monotonic()
    outcomes: dict[Run, dict[str, Outcome]] = {}
    left: list[Run] = []
    start_server()
    for index, run in enumerate(runs, 1):
        folder = output / run.name
        done = folder / "outcomes.json"
        if not done.exists():
            if time.monotonic() - begun > minutes * 60:
                left.append(run)
                continue
            started = time.monotonic()
            run_file(run, tree, folder, seconds)
            found = {test: [one.outcome, one.reason] for test, one in outcomes_of(run, folder).items()}
            write_text(done, json.dumps(found, indent=1) + "\n")
            counts = dict(Counter(outcome for outcome, _ in found.values()))
            print(f"{index}/{len(runs)} {run.name}: {counts}, {time.monotonic() - started:.0f} s", flush=True)
        outcomes[run] = {test: Outcome(*value) for test, value in json.loads(done.read_text()).items()}
    return Results(outcomes, left)


def table(results: Results, launches: Sequence[str]) -> str:
    """Return the table of folders, the reasons, the tests whose outcome differs, and what was not run.

    The table counts the files that ran with each launch line.
    """
    lines = ["| tests | ranks | rows of | passed | failed | skipped | cut off |", "|---|---|---|---|---|---|---|"]
    keys = dict.fromkeys((run.folder, run.num_ranks) for run in results.outcomes)
    arms = Counter((run.path, run.num_ranks) for run in results.outcomes)
    for folder, num_ranks in keys:
        for launch in launches:
            found = [tests for run, tests in results.outcomes.items()
                     if (run.folder, run.num_ranks, run.launch) == (folder, num_ranks, launch)
                and arms[run.path, run.num_ranks] == len(launches)]  # fmt: skip
            counts = Counter(one.outcome for tests in found for one in tests.values())
            if found:
                numbers = " | ".join(str(counts[kind]) for kind in (PASSED, FAILED, SKIPPED, CUT))
                lines.append(f"| `{folder}` | {num_ranks} | {launch or 'none: unpatched'} | {numbers} |")
    lines += ["", "Reasons of failed and cut off tests, unpatched:", ""]
    lines += [f"- {number}: {reason}" for reason, number in reasons(results).most_common(25)]
    differ = differences(results)
    lines += ["", f"Tests whose outcome differs: {len(differ) or 'none'}.", "", *(f"- {line}" for line in differ)]
    names = sorted({f"{run.path} ({run.num_ranks})" for run in results.not_started})
    lines += ["", f"Not started, time was over: {', '.join(names) or 'none'}."]
    return "\n".join(lines) + "\n"


def reasons(results: Results) -> Counter[str]:
    """Return how many unpatched tests failed or were cut off for each reason."""
    bad = (one for run, tests in results.outcomes.items() if run.launch == UNPATCHED for one in tests.values())
    return Counter(f"{one.outcome}: {one.reason}" for one in bad if one.outcome in (FAILED, CUT))


def differences(results: Results) -> list[str]:
    """Return a line for each test that passes in one arm only, or fails in one arm only."""
    lines = []
    for run, tests in results.outcomes.items():
        plain = results.outcomes.get(Run(run.path, run.num_ranks, UNPATCHED), {})
        for test, one in tests.items() if run.launch else ():
            before = plain.get(test)
            if before is not None and before.outcome != one.outcome:
                name = test.removeprefix(UNIT_TESTS + "/")
                lines.append(
                    f"{name}, {run.num_ranks} ranks, {run.launch}: {before.outcome} -> {one.outcome}: {one.reason}"
                )
    return lines


def commit_of(tree: Path) -> str:
    """Return the commit of a source tree, or "unknown" for a folder without git."""
    words = ["git", "-C", str(tree), "rev-parse", "HEAD"]
    with contextlib.suppress(OSError):
        process = subprocess.run(words, capture_output=True, text=True, check=False)
        return process.stdout.strip() or "unknown"
    return "unknown"


def parse_args(words: Sequence[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("tree", type=Path, help="source tree of NVIDIA/Megatron-LM")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="numbers of ranks (1 2)")
    parser.add_argument(
        "--only", nargs="+", default=CHOSEN, metavar="NAME", help="folders and files below tests/unit_tests"
    )
    parser.add_argument(
        "--launches", nargs="*", default=["documents"], metavar="NAME", help="launch lines whose rows are installed"
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="no file is started later (%(default)s)")
    parser.add_argument("--seconds", type=float, default=240.0, help="limit of one file (%(default)s)")
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "peers", help="folder of results (runs/peers)")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Run the files and print the table; exit code 1 if an outcome differs."""
    args = parse_args(words)
    launches = (UNPATCHED, *args.launches)
    files = files_of(args.tree.resolve(), args.only)
    runs = [Run(file, num, launch) for file in files for num in args.ranks for launch in launches]
    results = run_all(runs, args.tree.resolve(), args.output.resolve(), args.minutes, args.seconds)
    text = f"Megatron {commit_of(args.tree)}\n\n{table(results, launches)}"
    write_text(args.output / "table.md", text)
    print(text)
    return int(bool(differences(results)))


if __name__ == "__main__":
    sys.exit(main())
