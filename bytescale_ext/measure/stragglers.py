"""Find ranks that compute more slowly than the others, from the seconds of work that needs no other rank.

A rank that waits in a ring for a slow one takes as long as it, so only micro-batches without rings count, and only
their backward passes: forward passes may wait for parameters. Seconds are wall time (on CUDA, of the stream), because a
node that is throttled or shared takes no more processor time than others.
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
"""A rank is slow that takes at least this many times as long as the median of the others for equal work."""
FEWEST_PASSES = 8
WINDOW_SECONDS = 2.0
"""Shorter times tell what else a processor did: on a busy host a rank may be 2 times slower for half a second."""
_LEAST_SHARE = 0.5  # of C: in smaller micro-batches starting kernels takes a large part of the time


@dataclass(frozen=True)
class Straggler:
    """A slow rank: number among all processes, host, and how many times as long as others it takes."""

    rank: int
    host: str
    factor: float


@dataclass
class PaceWindow:
    """The last backward passes of this rank that needed no other rank: (planned work, seconds) of each.

    As few as last ``WINDOW_SECONDS`` and are ``FEWEST_PASSES``.
    """

    passes: deque[tuple[float, float]] = field(default_factory=deque)
    seconds: float = 0.0

    def add(self, work: float, seconds: float) -> None:
        """Add a backward pass. ``work``: its planned cost in any unit."""
        self.passes.append((work, seconds))
        self.seconds += seconds
        while len(self.passes) > FEWEST_PASSES and self.seconds - self.passes[0][1] >= WINDOW_SECONDS:
            self.seconds -= self.passes.popleft()[1]

    def seconds_per_work(self) -> float:
        """Return the median over the work in the window, which outliers do not move; NaN while it is not full."""
        if len(self.passes) < FEWEST_PASSES or self.seconds < WINDOW_SECONDS:
            return math.nan
        paces = sorted((seconds / work, work) for work, seconds in self.passes)
        done = list(accumulate(work for _, work in paces))
        return next(pace for (pace, _), work in zip(paces, done, strict=True) if work >= done[-1] / 2)


def counts_for_pace(micro_batch: MicroBatch, tokens_per_rank: int) -> bool:
    """Return whether a micro-batch runs on its rank alone and is large enough to tell the speed of the rank."""
    is_alone = all(len(shard.ring) == 1 for shard in micro_batch.shards)
    return is_alone and micro_batch.num_tokens >= _LEAST_SHARE * tokens_per_rank


def stragglers(paces: Mapping[int, float], hosts: Sequence[str]) -> tuple[Straggler, ...]:
    """Return the slow ranks of one pipeline stage.

    Args:
        paces: ``PaceWindow.seconds_per_work`` of each rank of the stage.
        hosts: of all processes.
    """
    known = {rank: pace for rank, pace in paces.items() if not math.isnan(pace)}
    found = []
    for rank, pace in known.items():
        others = [other for one, other in known.items() if one != rank]
        if others and pace >= SLOW_FACTOR * median(others):
            found.append(Straggler(rank, hosts[rank], round(pace / median(others), 2)))
    return tuple(found)


def stragglers_line(found: Sequence[Straggler]) -> str:
    """Return the line for the log."""
    named = ", ".join(f"rank {one.rank} on {one.host} takes {one.factor:.1f} times as long" for one in found)
    return f" hdp: slow: {named} as the other ranks for equal work (backward passes without rings)"
