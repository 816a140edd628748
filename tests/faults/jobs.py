"""Jobs that a fault may strike, on ranks that log to files and end like programs."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from scripts.cluster.ranks import rank_environment
from scripts.cluster.topology import Topology
from tests.e2e.corpora import write_documents
from tests.faults import strikes
from tests.faults.points import BATCH, FAULTS, LAYOUTS, NUM_RANKS, NUM_STEPS, SAVE_INTERVAL, Point
from tests.harness import free_port, run_ranks

LENGTHS = (256, 3, 190, 130, 100, 17, 64, 40, 90, 100, 33, 65, 129, 8, 120, 50, 9, 193, 60, 5, 77, 12, 31, 110)
assert len(LENGTHS) == BATCH * NUM_STEPS


@dataclass(frozen=True)
class Job:
    """A run of ``pretrain_gpt_hdp.py`` on all ranks.

    Attributes:
        flags: command line.
        folder: folder of logs and records of steps.
        point: fault that strikes, or None.
        topology: emulated network, or None.
        in_process: whether a process makes the plans, as for slow plans.
    """

    flags: tuple[str, ...]
    folder: Path
    point: Point | None = None
    topology: Topology | None = None
    in_process: bool = False


@dataclass(frozen=True)
class Ended:
    """Exit code of each rank (None: killed), and the seconds from the fault to the end of each rank."""

    codes: list[int | None]
    seconds: list[float]
    folder: Path

    def text(self, rank: int) -> str:
        """Return the output of a rank."""
        return (self.folder / f"rank{rank}.log").read_text(errors="replace")

    def last_line(self, rank: int) -> str:
        """Return the last line of a rank's output."""
        return self.text(rank).strip().splitlines()[-1]

    @property
    def completed(self) -> bool:
        """Whether all ranks trained to the end."""
        return self.codes == [0] * NUM_RANKS

    @property
    def found_finished(self) -> bool:
        """Whether all ranks refused a training whose last checkpoint was already written."""
        lines = [self.last_line(rank) for rank in range(NUM_RANKS)]
        return self.codes == [2] * NUM_RANKS and all("the training is finished" in line for line in lines)

    def documents(self) -> dict[int, list[str]]:
        """Return the documents of each step, as the ranks recorded them."""
        steps: dict[int, dict[str, str]] = {}
        for path in self.folder.glob("steps-*.jsonl"):
            for line in path.read_text().splitlines():
                record = json.loads(line)
                steps.setdefault(record["step"], {}).update(record["documents"])
        return {step: sorted(documents.values()) for step, documents in steps.items()}


def flags_of(point: Point, data: Sequence[object], save: Path, log_dir: Path) -> tuple[str, ...]:
    """Return the command line of a point's job; a second start continues from the checkpoints of the first."""
    from tests.e2e.training import HDP, MODEL, TRAIN

    job = [*LAYOUTS[point.layout].split(), "--data-path", *data, "--train-iters", NUM_STEPS, "--global-batch-size",
           point.batch, "--ckpt-format", point.ckpt_format, "--hdp-log-dir", log_dir]  # fmt: skip
    words = [*MODEL, *TRAIN, *HDP, *job, "--save", save, "--load", save, "--save-interval", SAVE_INTERVAL]
    return tuple(map(str, words))


def flags_of_fault(point: Point, folder: Path) -> tuple[str, ...]:
    """Return the additional flags of a fault, and create the folder of its pages."""
    if not FAULTS[point.fault].flags:
        return ()
    pages = folder / "pages"
    pages.mkdir()
    return (*FAULTS[point.fault].flags.split(), str(pages))


def write_data(point: Point, folder: Path) -> Path:
    """Write a data set that a point's run reads exactly once; return its prefix."""
    return write_documents(folder / "docs", LENGTHS, copies=point.batch // BATCH)


def run(job: Job) -> Ended:
    """Run a job until all ranks have ended. Raises TimeoutError if a rank hangs."""
    job.folder.mkdir(parents=True)
    port = free_port()
    codes = run_ranks(rank_main, NUM_RANKS, job, port, init_group=False, may_die=range(NUM_RANKS), timeout=120.0)
    struck = job.folder / "struck"
    seconds = []
    for rank in range(NUM_RANKS):
        ended = job.folder / f"ended-{rank}"
        if ended.exists():
            code, at = ended.read_text().split()
            codes[rank] = int(code)
            if struck.exists():  # the time of a full disk is unknown
                seconds.append(float(at) - float(struck.read_text()))
    return Ended(codes, seconds, job.folder)


def rank_main(rank: int, world: int, job: Job, port: int) -> int:
    """Run one rank; a failure ends its process immediately, as in a program."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    if job.topology is not None:
        os.environ.update(rank_environment(job.topology, rank), GLOO_SOCKET_IFNAME="eth0")
        with open(f"/run/netns/{job.topology.namespace(rank)}") as namespace:
            os.setns(namespace.fileno(), os.CLONE_NEWNET)
    log = os.open(job.folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[attr-defined]
    code = 1
    try:
        _train(rank, job)
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    (job.folder / f"ended-{rank}").write_text(f"{code} {time.time()}")
    if code:
        os._exit(code)
    return code


def _train(rank: int, job: Job) -> None:
    import pretrain_gpt_hdp
    from tests.e2e.training import plan_in_process

    plan_in_process(job.in_process)
    if job.point is not None and FAULTS[job.point.fault].ends:  # other faults keep Megatron's time limit
        strikes.shorten_timeout()
    sys.argv = ["pretrain_gpt_hdp.py", *job.flags]
    pretrain_gpt_hdp.main(partial(_prepare, rank, job))


def _prepare(rank: int, job: Job, training: Any, runtime: Any) -> Any:
    """Prepare the record of steps and the fault; return the training unchanged."""
    strikes.record_steps(runtime, job.folder, rank)
    if job.point is not None and job.point.rank == rank:
        strikes.prepare(job.point, runtime, job.topology, job.folder / "struck")
    if job.point is not None and job.point.fault == "slow":
        is_slow = job.point.rank == rank
        strikes.stretch(runtime, strikes.PASS_SECONDS * (strikes.SLOW_TIMES if is_slow else 1.0))
    return training
