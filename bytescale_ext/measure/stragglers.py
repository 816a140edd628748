"""Stragglers: ranks that compute more slowly than the others.

A rank that waits for a straggler in a ring takes as long as the straggler, so only micro-batches without rings are
compared. Forward passes may wait for parameters, so only backward passes are compared. Times are wall time (stream time
on CUDA), because a throttled or shared node uses no more processor time than others.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import median

from bytescale_ext.plan.step.micro_batch import MicroBatch

SLOW_FACTOR = 1.5
"""A straggler takes at least this many times as long as the median of the other ranks for equal work."""
FEWEST_PASSES = 8
FEWEST_SECONDS = 2.0
"""Shorter measurements show other load on the host, which can slow a rank by a factor of 2 for half a second."""
_LEAST_SHARE = 0.5  # of C; in smaller micro-batches kernel launches take a large part of the time


@dataclass(frozen=True)
class Straggler:
    """A slow rank.

    Attributes:
        rank: number of the rank among all processes.
        host: name of its host.
        factor: its time for equal work over the median time of the other ranks.
    """

    rank: int
    host: str
    factor: float


@dataclass
class PaceMeter:
    """Pace of this rank in its latest backward passes without rings.

    It keeps as few passes as possible, but at least ``FEWEST_PASSES`` that take at least ``FEWEST_SECONDS`` together.

    Attributes:
        passes: (planned work, seconds) of each pass.
        seconds: total seconds of the passes.
    """

    passes: deque[tuple[float, float]] = field(default_factory=deque)
    seconds: float = 0.0

    def add(self, work: float, seconds: float) -> None:
        """Add a backward pass; ``work`` is its planned cost in any unit."""
        self.passes.append((work, seconds))
        self.seconds += seconds
        while len(self.passes) > FEWEST_PASSES and self.seconds - self.passes[0][1] >= FEWEST_SECONDS:
            self.seconds -= self.passes.popleft()[1]

    def seconds_per_work(self) -> float:
        """Return the median seconds per unit of work, weighted by work; NaN until there are enough passes."""
        if len(self.passes) < FEWEST_PASSES or self.seconds < FEWEST_SECONDS:
            return math.nan
        paces = sorted((seconds / work, work) for work, seconds in self.passes)
        done = list(accumulate(work for _, work in paces))
        return next(pace for (pace, _), work in zip(paces, done, strict=True) if work >= done[-1] / 2)


def counts_for_pace(micro_batch: MicroBatch, tokens_per_rank: int) -> bool:
    """Return whether a micro-batch needs no other rank and is large enough to show the pace of its rank."""
    is_alone = all(len(shard.ring) == 1 for shard in micro_batch.shards)
    return is_alone and micro_batch.num_tokens >= _LEAST_SHARE * tokens_per_rank


def find_stragglers(paces: Mapping[int, float], hosts: Sequence[str]) -> tuple[Straggler, ...]:
    """Return the stragglers of one pipeline stage.

    Args:
        paces: ``PaceMeter.seconds_per_work`` of each rank of the stage.
        hosts: host of each process.
    """
    known = {rank: pace for rank, pace in paces.items() if not math.isnan(pace)}
    stragglers = []
    for rank, pace in known.items():
        other_paces = [known[other] for other in known if other != rank]
        if other_paces and pace >= SLOW_FACTOR * median(other_paces):
            stragglers.append(Straggler(rank, hosts[rank], round(pace / median(other_paces), 2)))
    return tuple(stragglers)


def stragglers_line(stragglers: Sequence[Straggler]) -> str:
    """Return the log line."""
    slow = ", ".join(f"rank {item.rank} on {item.host} takes {item.factor:.1f} times as long" for item in stragglers)
    return f" hdp: slow: {slow} as the other ranks for equal work (backward passes without rings)"
