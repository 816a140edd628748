"""The balance planner without aligned slots: widths, ranks and packs chosen together for the shortest step.

ByteScale (section 5) gives a sequence the fewest ranks that memory allows and balances afterwards. Here the width is
part of the balance: for a target time T a sequence gets at least as many ranks as it needs to finish in T, rings are
nested so that they never wait for each other (``nested_rings``), and short sequences, dealt by work and not by tokens,
level the ends. Several T are tried, from the lower bound on.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from bytescale_ext.plan.hdp.deadline import ShouldStop, stop_if
from bytescale_ext.plan.hdp.free.local_search import place_small
from bytescale_ext.plan.hdp.free.nested_rings import NestedRings, nest_rings, target_widths
from bytescale_ext.plan.hdp.packing import deal_by_work, split_into_packs
from bytescale_ext.plan.hdp.problem import Problem
from bytescale_ext.plan.step.placed import PlacedRanks

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

TARGETS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 1.1, 1.2, 1.35, 1.5, 2.0, 4.0)
"""Times of one sequence that are tried, as multiples of the lower bound of the step."""
_GOOD = 1.002  # a plan this near to the lower bound ends the search
_GOOD_SMALL = 1.02
MOST_SMALL = 256  # sequences of a step for which widths are searched one by one


def place_balanced(problem: Problem, should_stop: ShouldStop = None) -> PlacedRanks:
    """Place a step for the shortest time of its slowest rank."""
    if not len(problem.lengths):
        none = problem.lengths
        return PlacedRanks(problem.num_ranks, none, none, none, none)
    bound = max(problem.mean_seconds(), problem.longest_seconds())
    ordered, in_order = problem.longest_first()
    best: tuple[float, Ints, NestedRings] | None = None
    starts = []
    for target in TARGETS:
        stop_if(should_stop)
        widths = target_widths(ordered, bound * target)
        is_ring = (widths > 1) | (ordered.lengths > problem.tokens_per_rank)
        rings = nest_rings(ordered.lengths[is_ring], widths[is_ring], problem.cluster, problem.cost, should_stop)
        starts.append(widths[np.argsort(in_order)])
        is_short = np.ones(len(in_order), dtype=np.bool_)
        is_short[in_order[is_ring]] = False
        level = _water_level(rings.loads, _work(problem, problem.lengths[is_short]))
        makespan = max(float(rings.loads.max()), level)
        if best is None or makespan < best[0]:
            best = makespan, in_order[is_ring], rings
        if makespan <= _GOOD * bound:
            break
    assert best is not None
    placed, seconds = _with_shorts(problem, in_order, best[1], best[2])
    if len(in_order) > MOST_SMALL or seconds <= _GOOD_SMALL * bound:
        return placed
    return place_small(problem, starts, placed, seconds, bound, should_stop)


def _work(problem: Problem, lengths: Ints) -> Floats:
    """Return the seconds of short sequences, [n], on one rank, with their share of a full micro-batch's fixed cost."""
    cost, sizes = problem.cost, lengths.astype(np.float64)
    return np.asarray(cost.a * cost.squares(sizes) + (cost.b + cost.g / problem.tokens_per_rank) * sizes)


def _water_level(loads: Floats, work: Floats) -> float:
    """Return the load of the least loaded ranks once all ``work``, [n], is spread over them; ``loads``: [ranks]."""
    in_order = np.sort(loads)
    levels = (np.cumsum(in_order) + work.sum()) / np.arange(1, len(loads) + 1)
    return float(levels[np.append(in_order[1:] >= levels[:-1], True).argmax()])


def _with_shorts(problem: Problem, in_order: Ints, ringed: Ints, rings: NestedRings) -> tuple[PlacedRanks, float]:
    """Add the short sequences after the rings, dealt by work, then packed under C on each rank.

    ``in_order``: all sequences, longest first, [n]; ``ringed``: the sequence of each ring. Returns plan and makespan.
    """
    num_ranks, lengths = problem.num_ranks, problem.lengths
    firsts, widths, orders = (np.ones(len(lengths), dtype=np.int64) for _ in range(3))
    firsts[ringed], widths[ringed], orders[ringed] = rings.first_ranks, rings.widths, np.arange(len(ringed))
    is_short = np.ones(len(lengths), dtype=np.bool_)
    is_short[ringed] = False
    shorts = in_order[is_short[in_order]]
    work = _work(problem, lengths[shorts])
    firsts[shorts] = deal_by_work(work, rings.loads)
    orders[shorts] = len(ringed) + split_into_packs(lengths[shorts], firsts[shorts], problem.tokens_per_rank)
    seconds = rings.loads + np.bincount(firsts[shorts], weights=work, minlength=num_ranks)
    return PlacedRanks(num_ranks, lengths, firsts, widths, orders), float(seconds.max())
