"""Pools: runs of about equally fast ranks on which the rings of an aligned plan stay.

A slot of a ring takes all its ranks as long as the slowest of them, so a slow rank in a ring slows faster ranks. Rings
therefore stay in pools. The widest pool has the longest rings. Ranks without rings get short sequences only.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from bytescale_ext.plan.hdp.aligned.shelves import EmptySpan, RingWork
from bytescale_ext.plan.step.sizes import Cluster

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

FAST, ALL = "fast", "all"
POOLS: Final = (FAST, ALL)
"""Ranks that have rings: fast ranks only, or all ranks, in pools of ranks of alike speeds."""

ALIKE: Final = 0.9
"""Speeds are alike from this share of the fastest of them on."""


@dataclass(frozen=True, slots=True)
class Pool:
    """A span of ranks with its rings, and the speed of its slowest rank."""

    span: EmptySpan
    speed: float = 1.0


def pools_of(work: RingWork, ranks: str) -> tuple[Pool, ...]:
    """Return pools that cover all ranks and hold all rings; one pool if the longest ring fits in no run of ranks.

    A pool takes rings in proportion to its ranks and their speed.

    Args:
        work: rings of the step, longest first.
        ranks: one of ``POOLS``.
    """
    cluster, num_rings = work.cluster, len(work.seconds)
    speeds = cluster.rank_speeds()
    is_fast = speeds >= fast_speed(speeds)
    kinds = is_fast.astype(np.int64) if ranks == FAST else groups_of(speeds)
    runs = sorted(runs_of(cluster, kinds), key=lambda run: (run[0] - run[1], run[0]))
    chosen = [run for run in runs if ranks == ALL or is_fast[run[0]]]
    others = [run for run in runs if run not in chosen]
    widths = [stop - first for first, stop in chosen]
    if num_rings and widths[0] < work.min_widths[0]:
        return (Pool(EmptySpan(0, cluster.num_ranks, 0, num_rings), float(speeds.min())),)
    slowest = [float(speeds[first:stop].min()) for first, stop in chosen]
    until, shares = np.cumsum(work.seconds), np.cumsum(np.multiply(widths, slowest))
    targets = shares / shares[-1] * (until[-1] if num_rings else 0.0)
    ends = until.searchsorted(targets, side="right")
    too_wide = [
        int((work.min_widths > width).sum()) for width in (*widths[1:], 0)
    ]  # rings that later pools cannot hold
    stops = np.maximum.accumulate(np.minimum(np.maximum(ends, too_wide), num_rings)).tolist()
    stops[-1] = num_rings
    spans = [EmptySpan(*run, *rings) for run, rings in zip(chosen, pairwise([0, *stops]), strict=True)]
    without_rings = (Pool(EmptySpan(*run, num_rings, num_rings)) for run in others)
    return (*(Pool(span, speed) for span, speed in zip(spans, slowest, strict=True)), *without_rings)


def fast_speed(speeds: Floats) -> float:
    """Return the least speed of fast ranks: the speed that, times the number of fast ranks, is largest.

    ``speeds``: speed of each rank: [num_ranks].
    """
    falling = np.sort(speeds)[::-1]
    return float(falling[(falling * np.arange(1, len(falling) + 1)).argmax()])


def groups_of(speeds: Floats) -> Ints:
    """Return the number of the group of alike speeds of each rank: [num_ranks], as ``speeds``."""
    groups, rest = np.zeros(len(speeds), dtype=np.int64), speeds
    while len(rest):
        limit = ALIKE * rest.max()
        groups += speeds < limit
        rest = rest[rest < limit]
    return groups


def runs_of(cluster: Cluster, kinds: Ints) -> list[tuple[int, int]]:
    """Return the first rank and the stop of each run of ranks of one kind.

    A run that begins inside a node ends with the node, so that narrow rings stay inside nodes.

    ``kinds``: kind of each rank: [num_ranks].
    """
    node = cluster.node_ranks
    bounds = [0, *(np.flatnonzero(kinds[1:] != kinds[:-1]) + 1).tolist(), cluster.num_ranks]
    runs: list[tuple[int, int]] = []
    for first, stop in pairwise(bounds):
        edge = min(stop, -(-first // node) * node)
        runs += [run for run in ((first, edge), (edge, stop)) if run[0] < run[1]]
    return runs
