"""Steps of few sequences: a local search over widths, with list scheduling on contiguous ranks.

With many sequences, nested runs are close to optimal (``nested_rings``). With few, no run divides evenly and no short
sequences level the ends; then it helps to try each sequence on a few ranks more or fewer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from bytescale_ext.plan.hdp.deadline import ShouldStop, stop_if
from bytescale_ext.plan.hdp.problem import Problem
from bytescale_ext.plan.step.placed import PlacedRanks

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_MOST_PLACEMENTS = 15_000  # of single sequences; this bounds the time of the search


@dataclass(frozen=True, slots=True)
class Listed:
    """A list schedule: when the last rank ends, sequences in the order of placing, and their first ranks: [n] each."""

    seconds: float
    order: Ints
    first_ranks: Ints


def list_schedule(problem: Problem, widths: Ints) -> Listed:
    """Place the longest-running sequence first, each where it can start first (tie: least total time, lowest rank).

    ``widths``: ranks of each sequence: [n].
    """
    lengths, num_ranks, node, cost = problem.lengths, problem.num_ranks, problem.cluster.node_ranks, problem.cost
    seconds = cost.sequence_cost(lengths.astype(np.float64), widths.astype(np.float64)) + cost.g
    order = np.lexsort((np.arange(len(lengths)), -widths, -seconds))
    ready = np.zeros(num_ranks)
    firsts = np.zeros(len(lengths), dtype=np.int64)
    places: dict[int, tuple[Ints, Floats]] = {}  # width -> first ranks, and a view of ``ready`` from each rank on
    for width in set(widths.tolist()):
        windows = np.ndarray((num_ranks - width + 1, width), ready.dtype, ready, strides=2 * ready.strides)
        places[width] = _starts(num_ranks, node, width), windows
    for seq in order.tolist():
        width = int(widths[seq])
        starts, windows = places[width]
        ends = windows[starts]
        best = int(np.lexsort((ends.sum(axis=1), ends.max(axis=1)))[0])
        first = firsts[seq] = int(starts[best])
        ready[first : first + width] = windows[first].max() + seconds[seq]
    return Listed(float(ready.max(initial=0.0)), order, firsts)


@cache
def _starts(num_ranks: int, node_ranks: int, width: int) -> Ints:
    """Return the first ranks that a ring may have: inside a node, or at the first rank of one if it is wider."""
    starts = np.arange(num_ranks - width + 1)
    return starts[starts % node_ranks + width <= node_ranks if width <= node_ranks else starts % node_ranks == 0]


def place_small(
    problem: Problem,
    starts: list[Ints],
    placed: PlacedRanks,
    placed_seconds: float,
    bound: float,
    should_stop: ShouldStop = None,
) -> PlacedRanks:
    """Search widths from each of ``starts`` and return the best plan found, or ``placed`` if none is better.

    Args:
        problem: the step.
        starts: widths of all sequences to begin with: [n] each.
        placed, placed_seconds: a plan and its makespan.
        bound: no plan is shorter.
        should_stop: see ``HdpPlanner``.
    """
    most = np.minimum(problem.lengths, problem.num_ranks)
    left = _MOST_PLACEMENTS // max(len(problem.lengths), 1)
    best, best_widths = Listed(placed_seconds, np.zeros(0, dtype=np.int64), placed.first_ranks), placed.widths
    seen: set[bytes] = set()
    for start in starts:
        widths, listed = start, list_schedule(problem, start)
        tries = _neighbours(widths, problem.min_widths, most)
        while tries and left > 0 and listed.seconds > bound * (1 + 1e-9):
            seq, width = tries.pop()
            other = widths.copy()
            other[seq] = width
            if other.tobytes() in seen:
                continue
            stop_if(should_stop)
            seen.add(other.tobytes())
            left -= 1
            tried = list_schedule(problem, other)
            if tried.seconds < listed.seconds * (1 - 1e-9):
                widths, listed, tries = other, tried, _neighbours(other, problem.min_widths, most)
        if listed.seconds < best.seconds * (1 - 1e-9):
            best, best_widths = listed, widths
    return _packed(problem, best, best_widths) if len(best.order) else placed


def _neighbours(widths: Ints, min_widths: Ints, max_widths: Ints) -> list[tuple[int, int]]:
    """Return (sequence, new width) of all changes: one rank more or fewer, twice or half. The last is tried first.

    ``widths`` and their limits: [n] each.
    """
    changes = []
    for seq, (width, low, high) in enumerate(
        zip(widths.tolist(), min_widths.tolist(), max_widths.tolist(), strict=True)
    ):
        for other in dict.fromkeys((width + 1, width - 1, 2 * width, width // 2)):
            if low <= other <= high and other != width:
                changes.append((seq, other))
    return changes[::-1]


def _packed(problem: Problem, listed: Listed, widths: Ints) -> PlacedRanks:
    """Return the plan of a list schedule with ``widths``, [n].

    Local sequences that follow each other on a rank share micro-batches under C.
    """
    tokens_per_rank = problem.tokens_per_rank
    orders = np.zeros(len(widths), dtype=np.int64)
    packs: dict[int, tuple[int, int]] = {}  # rank -> (order, tokens) of its last micro-batch, where it is a pack
    for order, seq in enumerate(listed.order.tolist()):
        first, length = int(listed.first_ranks[seq]), int(problem.lengths[seq])
        orders[seq] = order
        if widths[seq] > 1 or length > tokens_per_rank:
            for rank in range(first, first + int(widths[seq])):
                packs.pop(rank, None)
            continue
        pack, tokens = packs.get(first, (order, tokens_per_rank))
        if tokens + length <= tokens_per_rank:
            orders[seq] = pack
            packs[first] = (pack, tokens + length)
        else:
            packs[first] = (order, length)
    return PlacedRanks(problem.num_ranks, problem.lengths, listed.first_ranks, widths, orders)
