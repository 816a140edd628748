"""ByteScale's balance strategy as published (section 6, Algorithm 2), to compare with; widths are those of memory."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from bytescale_ext.plan.cost import CostModel
from bytescale_ext.plan.hdp import aligned_slots, least_loaded_window
from bytescale_ext.plan.moldable import ShouldStop, stop_if
from bytescale_ext.plan.packing import pack_best_fit
from bytescale_ext.plan.placed import PlacedRanks

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

NUM_BUCKETS = 16


def place_algorithm2(
    lengths: Ints,
    least: Ints,
    num_ranks: int,
    tokens_per_rank: int,
    cost: CostModel,
    aligned: bool,
    should_stop: ShouldStop = None,
) -> PlacedRanks:
    """Algorithm 2: DP-Balance, or PP-Balance when the slots must be aligned.

    What the paper leaves open is settled like this. Short sequences are packed first, best fit under C (Algorithm 1,
    lines 7 to 9); a pack is then treated as one sequence on one rank. There are 16 buckets of about equal work, longest
    sequences first (a pack counts by its longest one; tie: older pack). DP-Balance empties them one after the other,
    PP-Balance takes one sequence of each in turn. A sequence goes to the contiguous ranks of which the latest is ready
    first (tie: least total time, lowest rank). Target ranks are those behind the latest by more than delta; the ranks
    that are ready first are among them whenever there are any, so delta changes nothing and is left out.

    Args:
        lengths: tokens of each sequence: [n].
        least: ranks of each sequence: [n].
        num_ranks: HDP ranks.
        tokens_per_rank: C.
        cost: forward and backward together.
        aligned: aligned slots. A ring takes the first slot after the latest of its ranks, a pack the first free one.
        should_stop: see ``HdpPlanner``.
    """
    in_order = np.argsort(-lengths, kind="stable")
    is_long = lengths[in_order] > tokens_per_rank
    packs = pack_best_fit(lengths.tolist(), in_order[~is_long].tolist(), tokens_per_rank)
    items: list[Sequence[int]] = [(seq,) for seq in in_order[is_long].tolist()]
    items += sorted(packs, key=lambda pack: -int(lengths[pack[0]]))
    widths = np.array([least[item[0]] for item in items], dtype=np.int64)
    each = cost.sequence_costs(lengths.astype(np.float64), least.astype(np.float64))
    seconds = np.array([sum(each[seq] for seq in item) for item in items]) + cost.g
    turns = list(_turns(seconds * widths, aligned))
    placed_on = _windows(seconds, widths, turns, num_ranks, should_stop)
    slots = aligned_slots(placed_on[turns], widths[turns], num_ranks) if aligned else np.arange(len(items))
    firsts, orders = np.zeros_like(least), np.zeros_like(least)
    for turn, number in enumerate(turns):
        firsts[list(items[number])], orders[list(items[number])] = placed_on[number], slots[turn]
    return PlacedRanks(num_ranks, lengths, firsts, least, orders, aligned)


def _turns(work: Floats, in_turn: bool) -> Iterator[int]:
    """The order in which items are taken from buckets of about equal work: bucket after bucket, or one of each."""
    if not len(work):
        return
    done = np.cumsum(work) - work / 2
    buckets = np.minimum((done * NUM_BUCKETS / work.sum()).astype(np.int64), NUM_BUCKETS - 1)
    place = np.arange(len(work)) - np.searchsorted(buckets, buckets)
    yield from (np.lexsort((buckets, place)) if in_turn else np.arange(len(work))).tolist()


def _windows(seconds: Floats, widths: Ints, turns: list[int], num_ranks: int, should_stop: ShouldStop) -> Ints:
    """First rank of each item, placed in the order of ``turns``: [items]."""
    firsts = np.zeros(len(widths), dtype=np.int64)
    ready = np.zeros(num_ranks)
    heap = [(0.0, rank) for rank in range(num_ranks)]  # (ready, rank); entries of the past are skipped
    for count, number in enumerate(turns):
        if count % 1024 == 0:
            stop_if(should_stop)
        width = int(widths[number])
        if width > 1:
            first = least_loaded_window(ready, width)
        else:
            while heap[0][0] != ready[heap[0][1]]:
                heapq.heappop(heap)
            first = heap[0][1]
        window = slice(first, first + width)
        ready[window] = ready[window].max() + seconds[number]
        for rank in range(first, first + width):
            heapq.heappush(heap, (float(ready[rank]), rank))
        firsts[number] = first
    return firsts
