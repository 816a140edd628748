"""Where the time of emulated ranks goes: computing, sending, other threads, waiting; and bytes between nodes.

Processor time is read by thread from ``/proc``: a rank's main thread computes, gloo's threads carry messages, and the
others load data, and plan where that takes no process of its own. A rank with a share of a core cannot do these at
once, so in wall time each takes its processor time over the share; the rest is waiting. Main threads also copy into
sockets, so "sending" is a lower bound.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.cluster.quotas import QuotaGroups
from scripts.cluster.topology import BETWEEN_NODES, Topology

KINDS = ("computing", "sending", "other")
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Sample:
    """Totals of all ranks since they started.

    Attributes:
        wall: seconds of a clock.
        seconds: processor time of each of ``KINDS``.
        between_bytes: sent to ranks of other nodes.
    """

    wall: float
    seconds: tuple[float, ...]
    between_bytes: int


@dataclass(frozen=True)
class Split:
    """The time of all ranks between two samples, in the mean of its steps.

    Attributes:
        wall_seconds: of a step.
        computing, sending, other, waiting: shares of the time of all ranks, which add up to 1.
        between_bytes: sent between nodes, in a step.
    """

    wall_seconds: float
    computing: float
    sending: float
    other: float
    waiting: float
    between_bytes: float

    @classmethod
    def of(cls, samples: Sequence[Sample], topology: Topology) -> Split:
        """Return what was spent from the first of several samples to the last; there is a step between two."""
        first, last, num_steps = samples[0], samples[-1], len(samples) - 1
        wall = last.wall - first.wall
        capacity = wall * topology.num_ranks * topology.cores_per_rank
        shares = [(b - a) / capacity for a, b in zip(first.seconds, last.seconds, strict=True)]
        waiting = max(0.0, 1.0 - sum(shares))
        return cls(wall / num_steps, *shares, waiting, (last.between_bytes - first.between_bytes) / num_steps)

    def __str__(self) -> str:
        """Return one line."""
        shares = ", ".join(f"{kind} {getattr(self, kind):.0%}" for kind in (*KINDS, "waiting"))
        return f"{self.wall_seconds:.1f} s a step: {shares}; {self.between_bytes / 1e6:.1f} MB between nodes"


def take_sample(topology: Topology, groups: QuotaGroups) -> Sample:
    """Return the totals of this moment."""
    totals = [0.0] * len(KINDS)
    for rank in range(topology.num_ranks):
        for pid in groups.processes(rank):
            for number, seconds in enumerate(processor_seconds(Path(f"/proc/{pid}"))):
                totals[number] += seconds
    return Sample(time.monotonic(), tuple(totals), bytes_between_nodes(topology))


def processor_seconds(process: Path) -> tuple[float, ...]:
    """Return the processor time of a process (a folder of ``/proc``) by ``KINDS``; zeros once it has ended.

    Threads that have ended count as "other".
    """
    main = sending = 0.0
    try:
        for task in (process / "task").iterdir():
            name, seconds = _name_and_seconds(task)
            main += seconds * (task.name == process.name)
            sending += seconds * ("gloo" in name)
        return main, sending, max(0.0, _name_and_seconds(process)[1] - main - sending)
    except (FileNotFoundError, ProcessLookupError):  # a thread or the process has ended meanwhile
        return (0.0,) * len(KINDS)


def _name_and_seconds(folder: Path) -> tuple[str, float]:
    """Return the name and the processor time of a thread, or of a whole process with all its threads."""
    name, _, rest = (folder / "stat").read_text().partition("(")[2].rpartition(")")
    fields = rest.split()  # from the third field of proc(5) on: utime and stime are the 14th and 15th
    return name, (int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND


def bytes_between_nodes(topology: Topology) -> int:
    """Return the bytes that all ranks have sent to other nodes, by the counters of their links."""
    if topology.num_nodes == 1:
        return 0
    total = 0
    for rank in range(topology.num_ranks):
        command = ("tc", "-n", topology.namespace(rank), "-s", "class", "show", "dev", "eth0")
        total += sent_by_class(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
    return total


def sent_by_class(classes: str) -> int:
    """Return the bytes of the class between nodes, as ``tc -s class show`` prints it. Raises ValueError without it."""
    found = re.search(rf"^class htb {BETWEEN_NODES} .*\n Sent (\d+) bytes", classes, re.MULTILINE)
    if found is None:
        raise ValueError(f"tc shows no class {BETWEEN_NODES}: {classes!r}")
    return int(found[1])
