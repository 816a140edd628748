"""A local search over widths for steps of few sequences, with list scheduling on contiguous ranks.

With many sequences, nested runs are close to optimal (``nested_rings``). With few sequences, no run divides evenly and
no short sequences level the ends. Then it helps to try each sequence on a few ranks more or fewer.
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

_MAX_PLACED = 15_000  # sequences placed by all list schedules together, which bounds the time of the search


@dataclass(frozen=True, slots=True)
class ListSchedule:
    """A list schedule.

    Attributes:
        seconds: time at which the last rank ends.
        order: sequences in the order of placing: [n].
        first_ranks: first rank of each sequence: [n].
    """

    seconds: float
    order: Ints
    first_ranks: Ints


def list_schedule(problem: Problem, widths: Ints) -> ListSchedule:
    """Place sequences by falling time, each where it ends first (tie: least total time, lowest rank).

    ``widths``: ranks of each sequence: [n].
    """
    lengths, num_ranks, node, cost = problem.lengths, problem.num_ranks, problem.cluster.node_ranks, problem.cost
    seconds = cost.sequence_cost(lengths.astype(np.float64), widths.astype(np.float64)) + cost.g
    order = np.lexsort((np.arange(len(lengths)), -widths, -seconds))
    ready = np.zeros(num_ranks)
    firsts = np.zeros(len(lengths), dtype=np.int64)
    equal, ring_speeds = problem.cluster.has_equal_speeds, problem.ring_speeds
    places: dict[int, tuple[Ints, Floats]] = {}  # width -> allowed first ranks, and a view of ``ready`` from each rank
    for width in set(widths.tolist()):
        windows = np.ndarray((num_ranks - width + 1, width), ready.dtype, ready, strides=2 * ready.strides)
        places[width] = starts, windows = _allowed_firsts(num_ranks, node, width), windows
    for seq in order.tolist():
        width = int(widths[seq])
        starts, windows = places[width]
        ends = windows[starts]
        latest = ends.max(axis=1)
        if not equal:
            latest = latest + seconds[seq] / ring_speeds.speeds(starts, width, int(lengths[seq]))
        best = int(np.lexsort((ends.sum(axis=1), latest))[0])
        first = firsts[seq] = int(starts[best])
        speed = ring_speeds.speed(first, width, int(lengths[seq]))
        ready[first : first + width] = windows[first].max() + seconds[seq] / speed
    return ListSchedule(float(ready.max(initial=0.0)), order, firsts)


@cache
def _allowed_firsts(num_ranks: int, node_ranks: int, width: int) -> Ints:
    """Return the first ranks with which a ring stays in one node or, if it is wider, begins with a node: [starts]."""
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
    """Search widths from each of ``starts``, and return the best plan or, if no plan is better, ``placed``.

    Args:
        problem: the step.
        starts: widths of all sequences to start from: [n] each.
        placed, placed_seconds: a plan and its makespan.
        bound: lower bound of the makespan.
        should_stop: see ``HdpPlanner``.
    """
    max_widths = np.minimum(problem.lengths, problem.num_ranks)
    num_left = _MAX_PLACED // max(len(problem.lengths), 1)
    best, best_widths = ListSchedule(placed_seconds, np.zeros(0, dtype=np.int64), placed.first_ranks), placed.widths
    placed_widths: set[bytes] = set()
    for start in starts:
        widths, schedule = start, list_schedule(problem, start)
        changes = _changes(widths, problem.min_widths, max_widths)
        while changes and num_left > 0 and schedule.seconds > bound * (1 + 1e-9):
            seq, width = changes.pop()
            new_widths = widths.copy()
            new_widths[seq] = width
            if new_widths.tobytes() in placed_widths:
                continue
            stop_if(should_stop)
            placed_widths.add(new_widths.tobytes())
            num_left -= 1
            new_schedule = list_schedule(problem, new_widths)
            if new_schedule.seconds < schedule.seconds * (1 - 1e-9):
                widths, schedule = new_widths, new_schedule
                changes = _changes(widths, problem.min_widths, max_widths)
        if schedule.seconds < best.seconds * (1 - 1e-9):
            best, best_widths = schedule, widths
    return _place(problem, best, best_widths) if len(best.order) else placed


def _changes(widths: Ints, min_widths: Ints, max_widths: Ints) -> list[tuple[int, int]]:
    """Return (sequence, new width) of all changes: one rank more or fewer, twice or half. The search pops the last.

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


def _place(problem: Problem, schedule: ListSchedule, widths: Ints) -> PlacedRanks:
    """Return the placement of a list schedule with ``widths``, [n].

    Consecutive local sequences of a rank share micro-batches of up to C tokens.
    """
    tokens_per_rank = problem.tokens_per_rank
    orders = np.zeros(len(widths), dtype=np.int64)
    packs: dict[int, tuple[int, int]] = {}  # rank -> (order, tokens) of its last micro-batch if that is a pack
    for order, seq in enumerate(schedule.order.tolist()):
        first, length = int(schedule.first_ranks[seq]), int(problem.lengths[seq])
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
    return PlacedRanks(problem.num_ranks, problem.lengths, schedule.first_ranks, widths, orders)
