"""Try a point: run a job with the fault, start it again if it ended, and list the problems."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.cluster.topology import Topology
from tests.faults import strikes
from tests.faults.jobs import Ended, Job, flags_of, flags_of_fault, run
from tests.faults.points import FAULTS, NUM_RANKS, NUM_STEPS, SAVE_INTERVAL, Point

SLACK_SECONDS = 10.0  # for ranks to notice the fault, to write the last line and to end, on a busy machine
TRACKER = "latest_checkpointed_iteration.txt"
PEER_LOST = re.compile(
    r"PeerLost: rank \d+, (step \d+|before the first step): .*(over ranks? [\d, ]+|with .*ranks? [\d, ]+|a collective)"
    r".*failed: .*--distributed-timeout-minutes"
)
SAVE_FAILED = re.compile(r"SaveFailed: rank \d+, step \d+: saving the checkpoint in .* failed: .*MB are free there")
SLOW = re.compile(r"hdp: slow: rank (\d) on \S+ takes ([\d.]+) times as long")


@dataclass(frozen=True)
class Undisturbed:
    """Reference run without a fault: loss and documents of each step, and bytes of the first checkpoint."""

    losses: dict[int, float]
    documents: dict[int, list[str]]
    checkpoint_bytes: int


@dataclass(frozen=True)
class Tried:
    """Result of a point.

    Attributes:
        name: name of the point.
        fault: key of ``FAULTS``.
        end_seconds: seconds from the fault to the end of the last rank; None if the run continued or the disk was full.
        resumed_from: iteration of the second run's checkpoint, 0 for the beginning; None without a second run.
        last_lines: last lines of the ranks that were not killed.
        problems: differences from the expected behaviour.
    """

    name: str
    fault: str
    end_seconds: float | None
    resumed_from: int | None
    last_lines: list[str]
    problems: list[str]


def losses_of(log_dir: Path) -> list[tuple[int, float]]:
    """Return (iteration, loss) of each line of metrics.jsonl."""
    path = log_dir / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [(row["iteration"], row["lm loss"]) for row in rows]


def undisturbed(point: Point, data: Sequence[object], folder: Path) -> Undisturbed:
    """Run the job of a point without its fault."""
    ended = run(Job(flags_of(point, data, folder / "save", folder / "log"), folder / "first"))
    assert ended.completed, ended.text(0)[-3000:]
    documents = ended.documents()
    each = [name for names in documents.values() for name in names]
    assert len(each) == len(set(each)) == point.batch * NUM_STEPS, documents
    saved = sum(path.stat().st_size for path in (folder / "save" / "iter_0000002").rglob("*") if path.is_file())
    return Undisturbed(dict(losses_of(folder / "log")), documents, saved)


def try_point(
    point: Point, data: Sequence[object], expected: Undisturbed, folder: Path, topology: Topology | None = None
) -> Tried:
    """Run a point in an empty folder, in the network of ``topology`` if it is given."""
    save, log_dir = folder / "save", folder / "log"
    flags = (*flags_of(point, data, save, log_dir), *flags_of_fault(point, folder))
    with small_disk(save, int((1 + point.share) * expected.checkpoint_bytes), point.fault == "full-disk") as make_room:
        first = run(Job(flags, folder / "first", point, topology, in_process=point.fault == "planner"))
        runs, resumed_from = [first], None
        if topology is not None:
            strikes.set_link(topology, point.rank, True)
        if not first.completed:
            make_room()
            if point.fault == "cut-short":
                truncate(save, point)
            runs.append(run(Job(flags, folder / "second", topology=topology)))
            resumed_from = min(runs[1].documents(), default=1) - 1
    tolerance = FAULTS[point.fault].tolerance
    problems = [*problems_of_end(point, first), *problems_of_runs(runs, expected, log_dir, tolerance)]
    lasts = [first.last_line(rank) for rank, code in enumerate(first.codes) if code]
    seconds = None if first.completed or not first.seconds else round(max(first.seconds), 1)
    return Tried(point.name, point.fault, seconds, resumed_from, lasts, problems)


def problems_of_end(point: Point, first: Ended) -> list[str]:
    """Return the problems in the reaction of the ranks to the fault."""
    problems = []
    fault = FAULTS[point.fault]
    if not fault.ends and not first.completed:
        problems.append(f"the run ended: {first.codes}")
    last_step = NUM_STEPS - SAVE_INTERVAL if point.fault == "killed-saving" else NUM_STEPS - 1
    if fault.ends and first.completed and point.step <= last_step:  # later it may come after the end
        problems.append("the fault changed nothing")
    if any("Exception in thread" in first.text(rank) for rank in range(NUM_RANKS)):
        problems.append("the fault could not strike")
    if not first.completed and max(first.seconds, default=0.0) > strikes.TIMEOUT_SECONDS + SLACK_SECONDS:
        problems.append(f"the ranks ended {max(first.seconds):.0f} s after the fault")
    named = (PEER_LOST, SAVE_FAILED) if point.fault == "full-disk" else (PEER_LOST,)
    for rank, code in enumerate(first.codes):
        if code and not any(pattern.search(first.last_line(rank)) for pattern in named):
            problems.append(f"last line of rank {rank}: {first.last_line(rank)}")
    if point.fault == "full-disk" and not any(SAVE_FAILED.search(first.text(rank)) for rank in range(NUM_RANKS)):
        problems.append("no rank says that saving failed")
    slow = SLOW.findall(first.text(NUM_RANKS - 1))
    if {int(rank) for rank, _ in slow} != ({point.rank} if point.fault == "slow" else set()):
        problems.append(f"slow ranks in the log: {slow}")
    return problems


def problems_of_runs(runs: Sequence[Ended], expected: Undisturbed, log_dir: Path, tolerance: float = 1e-5) -> list[str]:
    """Return the differences of losses and documents, over both starts, from the reference run."""
    problems = []
    if not runs[-1].completed and not runs[-1].found_finished:
        problems.append(f"the last start ended with {runs[-1].codes}: {runs[-1].last_line(0)}")
    for step, loss in losses_of(log_dir):
        if abs(loss / expected.losses[step] - 1) > tolerance:
            problems.append(f"loss of step {step}: {loss} and not {expected.losses[step]}")
    documents: dict[int, list[str]] = {}
    for run_end in runs:  # steps of a second start replace the steps that it repeats
        steps = run_end.documents()
        first_step = min(steps, default=NUM_STEPS + 1)
        documents = {step: names for step, names in documents.items() if step < first_step} | steps
    if documents != expected.documents:
        problems.append(f"documents: {documents}")
    return problems


def truncate(save: Path, point: Point) -> None:
    """Truncate a file of the last checkpoint, or the file that names it, as a host failure does."""
    tracker = save / TRACKER
    folder = save / f"iter_{int(tracker.read_text()):07d}"
    files = [*sorted(path for path in folder.rglob("*") if path.is_file()), tracker]
    file = files[point.number % len(files)]
    size = 0 if file == tracker else int(point.share * file.stat().st_size)
    with file.open("rb+") as opened:
        opened.truncate(size)


@contextlib.contextmanager
def small_disk(folder: Path, size: int, is_small: bool) -> Iterator[Callable[[], None]]:
    """Create a folder, with ``is_small`` as a file system of ``size`` bytes; yield a function that enlarges it."""
    folder.mkdir()
    if not is_small:
        yield lambda: None
        return

    def make_room() -> None:
        subprocess.run(["mount", "-o", "remount,size=1g", str(folder)], check=True)

    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=True)
    try:
        yield make_room
    finally:
        subprocess.run(["umount", str(folder)], check=True)
