"""Simple planners: naive HDP (ByteScale Algorithm 1), which works for every step, and a static mesh to compare with."""

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
    """Balance tokens (ByteScale section 5, Algorithm 1, "naive HDP"); it is quick and never stops early.

    A sequence of s > C tokens gets its fewest ranks, contiguous ones, and is a micro-batch of its own on each of them;
    shorter ones are packed best-fit into packs of C tokens, each on one rank. Placements are made one after another,
    longest sequence first (tie: lower index), then the packs, most tokens first (tie: older pack). Each goes where the
    fullest rank of its window has the fewest tokens so far (tie: fewest tokens in the whole window, then the lowest
    rank). Every rank runs its placements in this one global order, so rings cannot deadlock. Tokens are balanced, work
    is not: the squared cost of long sequences is left to the other planners.

    In aligned slots a ring takes the first slot that is free on all its ranks; then packs fill the gaps of their rank,
    and only then follow at its end. Sequences longer than C are never packed, whatever their width.
    """
    sizes, widths, num_ranks = problem.lengths, problem.min_widths, problem.num_ranks
    in_order = np.argsort(-sizes, kind="stable")
    num_long = int((sizes > problem.tokens_per_rank).sum())
    loads = np.zeros(num_ranks, dtype=np.int64)
    items: list[Sequence[int]] = [(seq,) for seq in in_order[:num_long].tolist()]
    places: list[int] = []
    for (seq,) in items:
        length, width = int(sizes[seq]), int(widths[seq])
        first = least_loaded_window(loads, width)
        loads[first : first + width] += length // width + (np.arange(width) < length % width)
        places.append(first)
    packs = pack_best_fit(sizes.tolist(), in_order[num_long:].tolist(), problem.tokens_per_rank)
    for pack, rank in _dealt(packs, sizes, loads):
        items.append(pack)
        places.append(rank)
    item_widths = widths[[item[0] for item in items]] if items else widths
    firsts_of_items = np.array(places, dtype=np.int64)
    slots = aligned_slots(firsts_of_items, item_widths, num_ranks) if problem.aligned else range(len(items))
    firsts, orders = np.zeros_like(widths), np.zeros_like(widths)
    for item, first, slot in zip(items, places, slots, strict=True):
        firsts[list(item)], orders[list(item)] = first, slot
    return PlacedRanks(num_ranks, sizes, firsts, widths, orders, problem.aligned)


def place_static(problem: Problem, should_stop: ShouldStop = None) -> PlacedRanks:
    """Place static context parallelism of ``static_width``, as ``--context-parallel-size`` with packed documents.

    Ranks form groups of ``static_width``. A pack holds up to ``static_width * C`` tokens (best fit), and every document
    of it is cut in zigzag over all ranks of its group, so that each rank holds ``ceil(s / static_width)`` tokens at
    most; the pack is filled by that count, which keeps every rank at C tokens or fewer. A document of fewer tokens
    than ``static_width`` uses the first ranks only. Packs are dealt to the groups in turn, in the order of packing.
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
    """Return the slots of micro-batches placed one after another on ``widths`` ranks from ``firsts`` on: [n] each.

    A ring takes the slot after the latest slot of its ranks, a micro-batch of one rank the first free slot there.
    """
    ends = np.zeros(num_ranks, dtype=np.int64)
    free: list[list[int]] = [[] for _ in range(num_ranks)]  # slots before the end, ascending
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

    ``loads``: [ranks].
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


def _dealt(packs: Sequence[Sequence[int]], sizes: Ints, loads: Ints) -> list[tuple[Sequence[int], int]]:
    """Deal packs to ranks, most tokens first, each to the rank with the fewest tokens so far (tie: lowest rank).

    ``sizes``: tokens of each sequence, [n]; ``loads``: tokens of each rank, [ranks]. Returns (pack, rank) pairs.
    """
    tokens = [int(sizes[list(pack)].sum()) for pack in packs]
    heap = [(int(load), rank) for rank, load in enumerate(loads)]
    heapq.heapify(heap)
    dealt = []
    for number in sorted(range(len(packs)), key=lambda number: (-tokens[number], number)):
        load, rank = heap[0]
        dealt.append((packs[number], rank))
        heapq.heapreplace(heap, (load + tokens[number], rank))
    return dealt
