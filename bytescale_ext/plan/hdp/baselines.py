"""Simple planners: naive HDP (ByteScale, Algorithm 1) and static context parallelism."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from bytescale_ext.plan.hdp.deadline import ShouldStop
from bytescale_ext.plan.hdp.packing import pack_best_fit
from bytescale_ext.plan.hdp.problem import Problem
from bytescale_ext.plan.step.placed import PlacedRanks

Ints = npt.NDArray[np.int64]


def place_naive(problem: Problem, should_stop: ShouldStop = None) -> PlacedRanks:
    """Balance tokens (ByteScale section 5, Algorithm 1, "naive HDP"). It is quick and ignores ``should_stop``.

    A sequence of s > C tokens gets the fewest contiguous ranks that hold it, and has a micro-batch to itself on each of
    them. Shorter sequences are packed best-fit into packs of C tokens, each on one rank. Long sequences are placed
    first, longest first (tie: lower index); then the packs, most tokens first (tie: older pack). Each goes to the
    window of ranks whose fullest rank has the fewest tokens (tie: fewest tokens in the window, then the lowest rank).
    All ranks run their micro-batches in the order of placing, so rings cannot deadlock. Tokens are balanced, but work
    is not: it grows with the square of the length.

    In aligned slots a ring takes the first slot that is free on all its ranks. Packs fill the gaps of their rank first.
    A sequence longer than C is never packed, whatever its width.
    """
    sizes, widths, num_ranks = problem.lengths, problem.min_widths, problem.num_ranks
    longest_first = np.argsort(-sizes, kind="stable")
    num_long = int((sizes > problem.tokens_per_rank).sum())
    loads = np.zeros(num_ranks, dtype=np.int64)
    items: list[Sequence[int]] = [(seq,) for seq in longest_first[:num_long].tolist()]
    item_firsts: list[int] = []
    for (seq,) in items:
        length, width = int(sizes[seq]), int(widths[seq])
        first = least_loaded_window(loads, width)
        loads[first : first + width] += length // width + (np.arange(width) < length % width)
        item_firsts.append(first)
    packs = pack_best_fit(sizes.tolist(), longest_first[num_long:].tolist(), problem.tokens_per_rank)
    for pack, rank in _deal_packs(packs, sizes, loads):
        items.append(pack)
        item_firsts.append(rank)
    if problem.aligned:
        item_widths = widths[[item[0] for item in items]] if items else widths
        slots = aligned_slots(np.array(item_firsts, dtype=np.int64), item_widths, num_ranks).tolist()
    else:
        slots = list(range(len(items)))
    firsts, orders = np.zeros_like(widths), np.zeros_like(widths)
    for item, first, slot in zip(items, item_firsts, slots, strict=True):
        firsts[list(item)], orders[list(item)] = first, slot
    return PlacedRanks(num_ranks, sizes, firsts, widths, orders, problem.aligned)


def place_static(problem: Problem, should_stop: ShouldStop = None) -> PlacedRanks:
    """Plan static context parallelism of ``static_width`` ranks, as ``--context-parallel-size`` on packed documents.

    Ranks form groups of ``static_width``. All ranks of a group share each of its documents in zigzag, so a rank holds
    at most ``ceil(s / static_width)`` tokens of a document. Documents are packed best-fit by this number, so that a
    rank has at most C tokens of a pack. A document with fewer tokens than ``static_width`` uses the first ranks only.
    Packs go to the groups in turn, in the order of packing.
    """
    width = problem.static_width
    assert width is not None, f"{problem=}"
    num_groups = problem.num_ranks // width
    shares = -(-problem.lengths // width)
    firsts, orders = np.zeros_like(shares), np.zeros_like(shares)
    for number, pack in enumerate(pack_best_fit(shares.tolist(), range(len(shares)), problem.tokens_per_rank)):
        firsts[list(pack)], orders[list(pack)] = number % num_groups * width, number // num_groups
    return PlacedRanks(problem.num_ranks, problem.lengths, firsts, problem.min_widths, orders, problem.aligned)


def aligned_slots(firsts: Ints, widths: Ints, num_ranks: int) -> Ints:
    """Return the slot of each micro-batch, in the order of placing: [n], as the arguments.

    A ring takes the slot after the latest slot of its ranks. A micro-batch on one rank takes the first free slot there.

    ``firsts``, ``widths``: first rank and ranks of each micro-batch: [n].
    """
    ends = np.zeros(num_ranks, dtype=np.int64)
    free: list[list[int]] = [[] for _ in range(num_ranks)]  # unused slots before the end, ascending
    slots = np.zeros(len(firsts), dtype=np.int64)
    for number, (first, width) in enumerate(zip(firsts.tolist(), widths.tolist(), strict=True)):
        if width == 1 and free[first]:
            slots[number] = heapq.heappop(free[first])
            continue
        slots[number] = slot = int(ends[first : first + width].max())
        for rank in range(first, first + width):
            free[rank].extend(range(int(ends[rank]), slot))
        ends[first : first + width] = slot + 1
    return slots


def least_loaded_window(loads: Ints | npt.NDArray[np.float64], width: int) -> int:
    """Return the first rank of the window of ``width`` ranks with the smallest (maximum load, total load, first rank).

    ``loads``: load of each rank: [ranks].
    """
    highest, covered = loads, 1
    while covered < width:  # maximum over windows of `covered` ranks, doubled until it reaches the width
        step = min(covered, width - covered)
        highest = np.maximum(highest[:-step], highest[step:])
        covered += step
    candidates = np.flatnonzero(highest == highest.min())
    sums = np.concatenate((np.zeros(1, dtype=loads.dtype), np.cumsum(loads)))
    totals = sums[candidates + width] - sums[candidates]
    return int(candidates[np.argmin(totals)])


def _deal_packs(packs: Sequence[Sequence[int]], sizes: Ints, loads: Ints) -> list[tuple[Sequence[int], int]]:
    """Deal packs to ranks, most tokens first, each to the rank with the fewest tokens so far (tie: lowest rank).

    ``sizes``: tokens of each sequence, [n]; ``loads``: tokens of each rank, [ranks]. Returns (pack, rank) pairs.
    """
    tokens = [int(sizes[list(pack)].sum()) for pack in packs]
    heap = [(int(load), rank) for rank, load in enumerate(loads)]
    heapq.heapify(heap)
    pairs = []
    for number in sorted(range(len(packs)), key=lambda number: (-tokens[number], number)):
        load, rank = heap[0]
        pairs.append((packs[number], rank))
        heapq.heapreplace(heap, (load + tokens[number], rank))
    return pairs
