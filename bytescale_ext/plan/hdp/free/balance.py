"""The balance planner without aligned slots: it chooses widths, ranks and packs together for the shortest step.

ByteScale (section 5) gives each sequence the fewest ranks that hold it, and balances afterwards. Here the width is part
of the balance. For a target time T, each sequence gets the ranks that it needs to finish in T. Rings are nested so that
they never wait for each other (``nested_rings``). Short sequences are dealt by work, which levels the ends of the
ranks. Several targets T around the lower bound are tried.
"""

from __future__ import annotations

from dataclasses import replace

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
"""Targets for the time of one sequence, as multiples of the step's lower bound, in the order of trying."""
_GOOD = 1.002  # a plan within this factor of the lower bound ends the search over targets
_GOOD_SMALL = 1.02  # a plan within this factor needs no local search
MAX_SMALL = 256  # the local search runs for steps of at most this many sequences


def place_balanced(problem: Problem, should_stop: ShouldStop = None) -> PlacedRanks:
    """Place a step so that its slowest rank takes the shortest time. Rings over unlike ranks may have uneven shares."""
    placed = _place(problem, should_stop)
    if not problem.is_uneven:
        return placed
    rings = zip(placed.first_ranks.tolist(), placed.widths.tolist(), placed.lengths.tolist(), strict=True)
    shares = {seq: problem.ring_speeds.shares(*ring) for seq, ring in enumerate(rings)}
    return replace(placed, shares={seq: of_ring for seq, of_ring in shares.items() if of_ring})


def _place(problem: Problem, should_stop: ShouldStop) -> PlacedRanks:
    """Return the placement, without the shares of its rings."""
    if not len(problem.lengths):
        empty = problem.lengths
        return PlacedRanks(problem.num_ranks, empty, empty, empty, empty)
    bound = max(problem.mean_seconds(), problem.longest_seconds())
    ordered, in_order = problem.longest_first()
    best: tuple[float, Ints, NestedRings] | None = None
    starts = []
    for target in TARGETS:
        stop_if(should_stop)
        widths = target_widths(ordered, bound * target)
        is_ring = (widths > 1) | (ordered.lengths > problem.tokens_per_rank)
        of_rings = (ordered.lengths[is_ring], widths[is_ring])
        rings = nest_rings(*of_rings, problem.cluster, problem.cost, should_stop, problem.ring_speeds)
        starts.append(widths[np.argsort(in_order)])
        is_short = np.ones(len(in_order), dtype=np.bool_)
        is_short[in_order[is_ring]] = False
        level = _water_level(rings.loads, _work(problem, problem.lengths[is_short]), problem.cluster.rank_speeds())
        makespan = max(float(rings.loads.max()), level)
        if best is None or makespan < best[0]:
            best = makespan, in_order[is_ring], rings
        if makespan <= _GOOD * bound:
            break
    assert best is not None
    placed, seconds = _with_shorts(problem, in_order, best[1], best[2])
    if len(in_order) > MAX_SMALL or seconds <= _GOOD_SMALL * bound:
        return placed
    return place_small(problem, starts, placed, seconds, bound, should_stop)


def _work(problem: Problem, lengths: Ints) -> Floats:
    """Return the seconds of each short sequence on one rank, with its share of a full micro-batch's overhead: [n].

    ``lengths``: tokens of each sequence: [n].
    """
    cost, sizes = problem.cost, lengths.astype(np.float64)
    return np.asarray(cost.a * cost.squares(sizes) + (cost.b + cost.g / problem.tokens_per_rank) * sizes)


def _water_level(loads: Floats, work: Floats, speeds: Floats) -> float:
    """Return the common load of the least loaded ranks after all work is spread over them as evenly as possible.

    ``loads``, ``speeds``: initial seconds and speed of each rank, [ranks]; ``work``: work to spread, [n].
    """
    in_order = np.argsort(loads, kind="stable")
    ascending, rates = loads[in_order], speeds[in_order]
    levels = (np.cumsum(ascending * rates) + work.sum()) / np.cumsum(rates)
    return float(levels[np.append(ascending[1:] >= levels[:-1], True).argmax()])


def _with_shorts(problem: Problem, in_order: Ints, ringed: Ints, rings: NestedRings) -> tuple[PlacedRanks, float]:
    """Add the short sequences after the rings: deal them by work and pack them under C on each rank.

    Args:
        problem: the step.
        in_order: all sequences, longest first: [n].
        ringed: sequence of each ring: [rings].
        rings: places of the rings.

    Returns:
        The placement and its makespan in seconds.
    """
    num_ranks, lengths = problem.num_ranks, problem.lengths
    firsts, widths, orders = (np.ones(len(lengths), dtype=np.int64) for _ in range(3))
    firsts[ringed], widths[ringed], orders[ringed] = rings.first_ranks, rings.widths, np.arange(len(ringed))
    is_short = np.ones(len(lengths), dtype=np.bool_)
    is_short[ringed] = False
    shorts = in_order[is_short[in_order]]
    work = _work(problem, lengths[shorts])
    speeds = problem.cluster.rank_speeds()
    firsts[shorts] = deal_by_work(work, rings.loads, problem.cluster.unequal_speeds())
    orders[shorts] = len(ringed) + split_into_packs(lengths[shorts], firsts[shorts], problem.tokens_per_rank)
    seconds = rings.loads + np.bincount(firsts[shorts], weights=work, minlength=num_ranks) / speeds
    return PlacedRanks(num_ranks, lengths, firsts, widths, orders), float(seconds.max())
