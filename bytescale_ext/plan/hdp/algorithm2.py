"""ByteScale's balance strategy as published (section 6, Algorithm 2), with the fewest ranks for each sequence."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from bytescale_ext.plan.hdp.baselines import aligned_slots, least_loaded_window
from bytescale_ext.plan.hdp.deadline import ShouldStop, stop_if
from bytescale_ext.plan.hdp.packing import pack_best_fit
from bytescale_ext.plan.hdp.problem import Problem
from bytescale_ext.plan.step.placed import PlacedRanks

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

NUM_BUCKETS = 16


def place_algorithm2(problem: Problem, should_stop: ShouldStop = None) -> PlacedRanks:
    """Run Algorithm 2: DP-Balance, or PP-Balance in aligned slots.

    The paper leaves some choices open. They are made as follows:

    * Short sequences are packed first, best fit under C (Algorithm 1, lines 7 to 9). A pack then counts as one item on
      one rank, and so does a long sequence on its ring.
    * There are 16 buckets of about equal work, longest sequences first (a pack counts by its longest sequence; tie: the
      older pack). DP-Balance empties one bucket after the other; PP-Balance takes one item of each bucket in turn.
    * An item goes to the contiguous ranks whose latest rank is ready first (tie: least total time, lowest rank).
    * The paper's target ranks are more than delta behind the latest rank. If there are any, the ranks that are ready
      first are among them. So delta changes nothing and is left out.

    In aligned slots a ring takes the first slot after the latest slot of its ranks; a pack takes the first free slot.
    """
    lengths, ring_widths, num_ranks, cost = problem.lengths, problem.min_widths, problem.num_ranks, problem.cost
    longest_first = np.argsort(-lengths, kind="stable")
    is_long = lengths[longest_first] > problem.tokens_per_rank
    packs = pack_best_fit(lengths.tolist(), longest_first[~is_long].tolist(), problem.tokens_per_rank)
    items: list[Sequence[int]] = [(seq,) for seq in longest_first[is_long].tolist()]
    items += sorted(packs, key=lambda pack: -int(lengths[pack[0]]))
    widths = np.array([ring_widths[item[0]] for item in items], dtype=np.int64)
    sequence_seconds = cost.sequence_cost(lengths.astype(np.float64), ring_widths.astype(np.float64))
    seconds = np.array([sum(sequence_seconds[seq] for seq in item) for item in items]) + cost.g
    turns = list(_placing_order(seconds * widths, problem.aligned))
    item_firsts = _first_ranks(seconds, widths, turns, num_ranks, should_stop)
    slots = aligned_slots(item_firsts[turns], widths[turns], num_ranks) if problem.aligned else np.arange(len(items))
    firsts, orders = np.zeros_like(ring_widths), np.zeros_like(ring_widths)
    for turn, number in enumerate(turns):
        firsts[list(items[number])], orders[list(items[number])] = item_firsts[number], slots[turn]
    return PlacedRanks(num_ranks, lengths, firsts, ring_widths, orders, problem.aligned)


def _placing_order(work: Floats, in_turn: bool) -> Iterator[int]:
    """Yield the items of buckets of about equal work: bucket after bucket, or one item of each bucket in turn.

    ``work``: work of each item: [items].
    """
    if not len(work):
        return
    midpoints = np.cumsum(work) - work / 2
    buckets = np.minimum((midpoints * NUM_BUCKETS / work.sum()).astype(np.int64), NUM_BUCKETS - 1)
    places = np.arange(len(work)) - np.searchsorted(buckets, buckets)  # inside the bucket
    yield from (np.lexsort((buckets, places)) if in_turn else np.arange(len(work))).tolist()


def _first_ranks(seconds: Floats, widths: Ints, turns: list[int], num_ranks: int, should_stop: ShouldStop) -> Ints:
    """Place the items in the order of ``turns``. Return their first ranks: [items], as ``seconds`` and ``widths``."""
    firsts = np.zeros(len(widths), dtype=np.int64)
    ready = np.zeros(num_ranks)
    heap = [(0.0, rank) for rank in range(num_ranks)]  # (ready, rank); outdated entries are skipped
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
