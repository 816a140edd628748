"""Shares of the time of emulated ranks (computing, sending, other threads, waiting), and bytes between nodes.

``/proc`` has the processor time of each thread: a rank's main thread computes, gloo's threads carry messages, and the
other threads load data and make plans. A rank with a share of a core does one of these at a time, so each takes its
processor time over the share in wall time; the rest is waiting. Main threads also copy into sockets, so *sending* is a
lower bound.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from scripts.cluster.quotas import QuotaGroups
from scripts.cluster.topology import BETWEEN_NODES, Topology

KINDS = ("computing", "sending", "other")
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_ENDED = (FileNotFoundError, ProcessLookupError)


@dataclass(frozen=True)
class Sample:
    """Totals of all ranks since their start.

    Attributes:
        wall: clock in seconds.
        seconds: processor seconds of each of ``KINDS``.
        between_bytes: bytes sent to other nodes.
    """

    wall: float
    seconds: tuple[float, ...]
    between_bytes: int


@dataclass(frozen=True)
class Split:
    """The time of all ranks between two samples, mean per step.

    Attributes:
        wall_seconds: seconds of a step.
        computing, sending, other, waiting: shares of the time of all ranks, with the sum 1.
        between_bytes: bytes sent between nodes.
    """

    wall_seconds: float
    computing: float
    sending: float
    other: float
    waiting: float
    between_bytes: float

    @classmethod
    def of(cls, samples: Sequence[Sample], topology: Topology) -> Split:
        """Return the split from the first to the last of several samples, which are one step apart."""
        first, last, num_steps = samples[0], samples[-1], len(samples) - 1
        wall = last.wall - first.wall
        capacity = wall * topology.num_ranks * topology.cores_per_rank
        shares = [(b - a) / capacity for a, b in zip(first.seconds, last.seconds, strict=True)]
        waiting = max(0.0, 1.0 - sum(shares))
        return cls(wall / num_steps, *shares, waiting, (last.between_bytes - first.between_bytes) / num_steps)

    def __str__(self) -> str:
        """Return the shares as one line."""
        shares = ", ".join(f"{kind} {getattr(self, kind):.0%}" for kind in (*KINDS, "waiting"))
        return f"{self.wall_seconds:.1f} s a step: {shares}; {self.between_bytes / 1e6:.1f} MB between nodes"


def take_sample(topology: Topology, groups: QuotaGroups) -> Sample:
    """Return the current totals."""
    totals = [0.0] * len(KINDS)
    for rank in range(topology.num_ranks):
        for pid in groups.processes(rank):
            for number, seconds in enumerate(processor_seconds(Path(f"/proc/{pid}"))):
                totals[number] += seconds
    return Sample(time.monotonic(), tuple(totals), bytes_between_nodes(topology))


def processor_seconds(process: Path) -> tuple[float, ...]:
    """Return the processor seconds of a process (a folder of ``/proc``) by ``KINDS``; zeros if it has ended.

    Ended threads count as "other".
    """
    main = sending = 0.0
    try:
        for task in (process / "task").iterdir():
            with suppress(*_ENDED):  # the thread has ended since it was listed
                name, seconds = _name_and_seconds(task)
                main += seconds * (task.name == process.name)
                sending += seconds * ("gloo" in name)
        return main, sending, max(0.0, _name_and_seconds(process)[1] - main - sending)
    except _ENDED:
        return (0.0,) * len(KINDS)


def _name_and_seconds(folder: Path) -> tuple[str, float]:
    """Return the name and the processor time of a thread, or of a whole process with all its threads."""
    name, _, rest = (folder / "stat").read_text().partition("(")[2].rpartition(")")
    fields = rest.split()  # from the third field of proc(5) on: utime and stime are the 14th and 15th
    return name, (int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND


def bytes_between_nodes(topology: Topology) -> int:
    """Return the bytes that all ranks have sent to other nodes, from the counters of their links."""
    if topology.num_nodes == 1:
        return 0
    total = 0
    for rank in range(topology.num_ranks):
        command = ("tc", "-n", topology.namespace(rank), "-s", "class", "show", "dev", "eth0")
        total += sent_by_class(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
    return total


def sent_by_class(classes: str) -> int:
    """Parse the bytes between nodes from ``tc -s class show``. Raises ValueError if their class is missing."""
    line = re.search(rf"^class htb {BETWEEN_NODES} .*\n Sent (\d+) bytes", classes, re.MULTILINE)
    if line is None:
        raise ValueError(f"tc shows no class {BETWEEN_NODES}: {classes!r}")
    return int(line[1])
