"""Where each sequence of one step is computed: hybrid data parallelism (ByteScale section 5) and a static baseline."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from bytescale_ext.plan.cost import CostModel, OffloadLimits
from bytescale_ext.plan.packing import pack_best_fit
from bytescale_ext.plan.placed import PlacedRanks
from bytescale_ext.plan.shapes import MicroBatch, Shard, StepPlan, zigzag_ranges

Ints = npt.NDArray[np.int64]


def plan_naive(
    lengths: Sequence[int], num_ranks: int, tokens_per_rank: int, tokens_multiple: int = 1, aligned: bool = False
) -> StepPlan:
    """Assign every sequence of a step to HDP ranks (ByteScale Algorithm 1, "naive HDP", without offloading).

    A sequence of s > C tokens gets ``D = ceil(s / C)`` contiguous ranks and is a micro-batch of its own on each
    of them; shorter ones are packed best-fit into packs of C tokens, each on one rank. Placements are made one
    after another, longest sequence first (tie: lower index), then the packs, most tokens first (tie: older pack).
    Each goes where the fullest rank of its window has the fewest tokens so far (tie: fewest tokens in the whole
    window, then the lowest rank). Every rank runs its placements in this one global order, so rings cannot
    deadlock. Tokens are balanced, work is not: the squared cost of long sequences is left to a balance scheduler.

    Pure: equal arguments give an equal plan on every rank, with no communication.

    Args:
        lengths: tokens of each sequence, at least 1 each.
        num_ranks: HDP ranks.
        tokens_per_rank: C, the most tokens of a micro-batch.
        tokens_multiple: every micro-batch is padded at its end to a multiple of this (the tensor-parallel size
            under sequence parallelism).
        aligned: aligned slots. A ring takes the first slot that is free on all its ranks, then the packs fill the
            holes of their rank before they follow at its end.

    Raises:
        ValueError: a count is not positive, C is no multiple of ``tokens_multiple``, a sequence is empty, or a
            sequence does not fit on ``num_ranks * C`` tokens (the message gives the smallest C that fits).
    """
    sizes = checked_lengths(lengths, num_ranks, tokens_per_rank, tokens_multiple)
    widths = least_widths(sizes, num_ranks, tokens_per_rank, tokens_multiple)
    placed = place_naive(sizes, widths, num_ranks, tokens_per_rank, aligned)
    return StepPlan(num_ranks, tokens_per_rank, tuple(sizes.tolist()), placed, aligned)


def place_naive(sizes: Ints, widths: Ints, num_ranks: int, tokens_per_rank: int, aligned: bool) -> PlacedRanks:
    """``plan_naive`` of known widths: [n] each. Sequences longer than C are never packed, whatever their width."""
    in_order = np.argsort(-sizes, kind="stable")
    num_long = int((sizes > tokens_per_rank).sum())
    loads = np.zeros(num_ranks, dtype=np.int64)
    items: list[Sequence[int]] = [(seq,) for seq in in_order[:num_long].tolist()]
    places: list[int] = []
    for (seq,) in items:
        length, width = int(sizes[seq]), int(widths[seq])
        first = least_loaded_window(loads, width)
        loads[first : first + width] += length // width + (np.arange(width) < length % width)
        places.append(first)
    packs = pack_best_fit(sizes.tolist(), in_order[num_long:].tolist(), tokens_per_rank)
    for pack, rank in _dealt(packs, sizes, loads):
        items.append(pack)
        places.append(rank)
    item_widths = widths[[item[0] for item in items]] if items else widths
    slots = aligned_slots(np.array(places, dtype=np.int64), item_widths, num_ranks) if aligned else range(len(items))
    firsts, orders = np.zeros_like(widths), np.zeros_like(widths)
    for item, first, slot in zip(items, places, slots, strict=True):
        firsts[list(item)], orders[list(item)] = first, slot
    return PlacedRanks(num_ranks, sizes, firsts, widths, orders, aligned)


def plan_static_cp(
    lengths: Sequence[int], num_ranks: int, tokens_per_rank: int, width: int, tokens_multiple: int = 1
) -> StepPlan:
    """The baseline: static context parallelism of ``width``, as ``--context-parallel-size`` with packed documents.

    Ranks form ``num_ranks / width`` groups. A pack holds up to ``width * C`` tokens (best fit), and every document
    of it is cut in zigzag over all ranks of its group, so that each rank holds ``ceil(s / width)`` tokens at most;
    the pack is filled by that count, which is what keeps every rank at C tokens or fewer. A document of fewer than
    ``width`` tokens uses the first ranks only. Packs are dealt to the groups in turn, in the order of packing.

    Raises:
        ValueError: as ``plan_naive``; also when ``width`` does not divide ``num_ranks``, or a document is longer
            than ``width * C``.
    """
    sizes = checked_lengths(lengths, num_ranks, tokens_per_rank, tokens_multiple).tolist()
    if width < 1 or num_ranks % width:
        raise ValueError(f"static width {width} does not divide {num_ranks} ranks; choose a divisor of {num_ranks}")
    for seq, size in enumerate(sizes):
        if size > width * tokens_per_rank:
            raise ValueError(
                f"sequence {seq} has {size} tokens, more than {width} ranks of {tokens_per_rank} tokens hold; "
                f"raise the width, or the tokens per rank to at least {_fitting(size, width, tokens_multiple)}"
            )
    shares = [-(-size // width) for size in sizes]
    ranks: list[list[MicroBatch]] = [[] for _ in range(num_ranks)]
    num_groups = num_ranks // width
    for number, pack in enumerate(pack_best_fit(shares, range(len(sizes)), tokens_per_rank)):
        first = number % num_groups * width
        shards: list[list[Shard]] = [[] for _ in range(width)]
        for seq in sorted(pack, key=lambda seq: (sizes[seq] == 1, seq)):  # local documents come after ring shards
            for rank, shard in _ring_shards(seq, sizes[seq], first, min(width, sizes[seq])):
                shards[rank - first].append(shard)
        for offset, rank_shards in enumerate(shards):
            if rank_shards:
                ranks[first + offset].append(MicroBatch(tuple(rank_shards)))
    return StepPlan(num_ranks, tokens_per_rank, tuple(sizes), tuple(tuple(rank) for rank in ranks))


def checked_lengths(lengths: Sequence[int], num_ranks: int, tokens_per_rank: int, tokens_multiple: int) -> Ints:
    """The lengths as an array, once all arguments are known to be sound; raises ValueError otherwise."""
    for name, value in (
        ("number of ranks", num_ranks),
        ("tokens per rank", tokens_per_rank),
        ("tokens multiple", tokens_multiple),
    ):
        if value < 1:
            raise ValueError(f"the {name} is {value}; it must be at least 1")
    if tokens_per_rank % tokens_multiple:
        raise ValueError(
            f"tokens per rank {tokens_per_rank} is no multiple of {tokens_multiple}, to which micro-batches are "
            f"padded; use {tokens_per_rank + -tokens_per_rank % tokens_multiple}"
        )
    sizes = np.array(lengths, dtype=np.int64)
    if (sizes < 1).any():
        seq = int((sizes < 1).argmax())
        raise ValueError(f"sequence {seq} has {sizes[seq]} tokens; drop it, a sequence needs at least 1")
    return sizes


def least_widths(
    sizes: Ints,
    num_ranks: int,
    tokens_per_rank: int,
    tokens_multiple: int = 1,
    limits: OffloadLimits | None = None,
    forward: CostModel | None = None,
) -> Ints:
    """The fewest ranks that hold each sequence, ``ceil(s / C)`` or, with offloading, ByteScale's Eq. 3: [n].

    Raises:
        ValueError: no width holds a sequence; names the smallest C that does.
    """
    most = np.full(len(sizes), tokens_per_rank, dtype=np.int64)
    if limits is not None and forward is not None:
        held = limits.most_tokens(sizes.astype(np.float64), tokens_per_rank, forward)
        most = np.floor(np.minimum(held, np.maximum(sizes + tokens_multiple, tokens_per_rank))).astype(np.int64)
        most -= most % tokens_multiple
    widths = -(-sizes // most)
    if (widths <= num_ranks).all():
        return widths
    seq = int((widths - num_ranks).argmax())
    share = _fitting(int(sizes[seq]), num_ranks, tokens_multiple)
    text = (
        f"more than {num_ranks} ranks of {tokens_per_rank} tokens hold; raise the tokens per rank to at least {share}"
    )
    if limits is not None and forward is not None:
        with_offload = math.ceil(limits.least_capacity(int(sizes[seq]), share, forward))
        with_offload += -with_offload % tokens_multiple
        text = (
            f"more than {num_ranks} ranks of {tokens_per_rank} tokens hold, {most[seq]} with offloading; raise the "
            f"tokens per rank to at least {with_offload} ({share} without offloading)"
        )
    raise ValueError(f"sequence {seq} has {sizes[seq]} tokens, {text}, or cut sequences with a smaller sequence length")


def _fitting(length: int, num_ranks: int, tokens_multiple: int) -> int:
    """The smallest tokens per rank, a multiple of ``tokens_multiple``, with which ``num_ranks`` hold a sequence."""
    share = -(-length // num_ranks)
    return share + -share % tokens_multiple


def _ring_shards(seq: int, length: int, first_rank: int, width: int) -> list[tuple[int, Shard]]:
    """(rank, shard) of a sequence on ranks ``first_rank .. first_rank + width - 1``."""
    ring = tuple(range(first_rank, first_rank + width))
    return [(rank, Shard(seq, zigzag_ranges(length, width, index), ring)) for index, rank in enumerate(ring)]


def aligned_slots(firsts: Ints, widths: Ints, num_ranks: int) -> Ints:
    """Slots of micro-batches that were placed one after another on ``width`` ranks from ``first`` on: [n].

    A ring takes the slot after the latest of its ranks, a micro-batch of one rank the first that is free there.
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
    """First rank of the window of ``width`` ranks with the smallest (maximum load, total load, first rank)."""
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
    """(pack, rank) of each pack, most tokens first, on the rank with the fewest tokens so far (tie: lowest rank)."""
    tokens = [int(sizes[list(pack)].sum()) for pack in packs]
    heap = [(int(load), rank) for rank, load in enumerate(loads)]
    heapq.heapify(heap)
    dealt = []
    for number in sorted(range(len(packs)), key=lambda number: (-tokens[number], number)):
        load, rank = heap[0]
        dealt.append((packs[number], rank))
        heapq.heapreplace(heap, (load + tokens[number], rank))
    return dealt
