"""The balance scheduler without pipelines: widths, ranks and packs chosen together for the shortest step.

ByteScale (section 5) gives a sequence the fewest ranks that memory allows and balances afterwards. Here the width is
part of the balance: for a target time T a sequence gets at least the ranks with which it takes T, rings are nested
so that they never wait for each other (``moldable``), and short sequences, dealt by work and not by tokens, level the
ends. Several T are tried, from the lower bound on.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from bytescale_ext.plan.balance_small import place_small
from bytescale_ext.plan.cost import CostModel
from bytescale_ext.plan.moldable import NestedRings, ShouldStop, nest_rings, stop_if, target_widths
from bytescale_ext.plan.packing import deal_by_work, split_into_packs
from bytescale_ext.plan.placed import PlacedRanks

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

TARGETS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 1.1, 1.2, 1.35, 1.5, 2.0, 4.0)
"""Times of one sequence that are tried, in lower bounds of the step."""
_GOOD = 1.002  # a plan this near to the lower bound ends the search
_GOOD_SMALL = 1.02
MOST_SMALL = 256  # sequences of a step for which widths are searched one by one


def mean_seconds(lengths: Ints, least: Ints, num_ranks: int, tokens_per_rank: int, cost: CostModel) -> float:
    """No plan is shorter: all work, that of rings of least width, spread evenly."""
    launches = -(-int(lengths.sum()) // (num_ranks * tokens_per_rank))
    seconds = cost.sequence_costs(lengths.astype(np.float64), least.astype(np.float64))
    return float((least * seconds).sum()) / num_ranks + cost.g * launches


def longest_seconds(lengths: Ints, least: Ints, num_ranks: int, cost: CostModel) -> float:
    """No plan is shorter: the longest of at least one sequence, at its best width."""
    longest = int(lengths.argmax())
    widths = np.arange(least[longest], num_ranks + 1, dtype=np.float64)
    return float(cost.sequence_costs(np.full(len(widths), float(lengths[longest])), widths).min()) + cost.g


def place_balanced(
    lengths: Ints,
    least: Ints,
    num_ranks: int,
    tokens_per_rank: int,
    cost: CostModel,
    node: int,
    should_stop: ShouldStop = None,
) -> PlacedRanks:
    """Place a step for the shortest time of its slowest rank.

    Args:
        lengths: tokens of each sequence: [n].
        least: the fewest ranks of each sequence that its memory allows: [n].
        num_ranks: HDP ranks.
        tokens_per_rank: C.
        cost: forward and backward together.
        node: ranks of a node.
        should_stop: see ``HdpPlanner``.
    """
    if not len(lengths):
        return PlacedRanks(num_ranks, lengths, lengths, lengths, lengths)
    bound = mean_seconds(lengths, least, num_ranks, tokens_per_rank, cost)
    bound = max(bound, longest_seconds(lengths, least, num_ranks, cost))
    in_order = np.lexsort((np.arange(len(lengths)), -lengths))
    best: tuple[float, Ints, NestedRings] | None = None
    starts = []
    for target in TARGETS:
        stop_if(should_stop)
        widths = target_widths(lengths[in_order], least[in_order], bound * target, cost, num_ranks)
        is_ring = (widths > 1) | (lengths[in_order] > tokens_per_rank)
        ringed = in_order[is_ring]
        rings = nest_rings(lengths[ringed], widths[is_ring], num_ranks, cost, node, should_stop)
        starts.append(widths[np.argsort(in_order)])
        short = np.ones(len(lengths), dtype=np.bool_)
        short[ringed] = False
        level = _water_level(rings.loads, _work(lengths[short], tokens_per_rank, cost))
        makespan = max(float(rings.loads.max()), level)
        if best is None or makespan < best[0]:
            best = makespan, ringed, rings
        if makespan <= _GOOD * bound:
            break
    assert best is not None
    placed, seconds = _with_shorts(lengths, in_order, best[1], best[2], tokens_per_rank, cost)
    if len(lengths) > MOST_SMALL or seconds <= _GOOD_SMALL * bound:
        return placed
    return place_small(lengths, least, starts, placed, seconds, bound, tokens_per_rank, cost, node, should_stop)


def _work(lengths: Ints, tokens_per_rank: int, cost: CostModel) -> Floats:
    """Seconds of short sequences on one rank, with their share of the cost of a full micro-batch."""
    sizes = lengths.astype(np.float64)
    return np.asarray(cost.a * sizes * sizes + (cost.b + cost.g / tokens_per_rank) * sizes)


def _water_level(loads: Floats, work: Floats) -> float:
    """How high the least loaded ranks stand when ``work`` is poured over all of them."""
    in_order = np.sort(loads)
    levels = (np.cumsum(in_order) + work.sum()) / np.arange(1, len(loads) + 1)
    return float(levels[np.append(in_order[1:] >= levels[:-1], True).argmax()])


def _with_shorts(
    lengths: Ints, in_order: Ints, ringed: Ints, rings: NestedRings, tokens_per_rank: int, cost: CostModel
) -> tuple[PlacedRanks, float]:
    """Add the short sequences after the rings: dealt by work, then packed under C on each rank. Plan and makespan."""
    num_ranks = len(rings.loads)
    firsts, widths, orders = (np.ones(len(lengths), dtype=np.int64) for _ in range(3))
    firsts[ringed], widths[ringed], orders[ringed] = rings.first_ranks, rings.widths, np.arange(len(ringed))
    is_short = np.ones(len(lengths), dtype=np.bool_)
    is_short[ringed] = False
    shorts = in_order[is_short[in_order]]
    work = _work(lengths[shorts], tokens_per_rank, cost)
    firsts[shorts] = deal_by_work(work, rings.loads)
    orders[shorts] = len(ringed) + split_into_packs(lengths[shorts], firsts[shorts], tokens_per_rank)
    seconds = rings.loads + np.bincount(firsts[shorts], weights=work, minlength=num_ranks)
    return PlacedRanks(num_ranks, lengths, firsts, widths, orders), float(seconds.max())
