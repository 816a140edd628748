"""Where each sequence of one step is computed: hybrid data parallelism (ByteScale section 5) and a static baseline."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from bytescale_ext.plan.packing import pack_best_fit
from bytescale_ext.plan.shapes import MicroBatch, Shard, StepPlan, zigzag_ranges


def plan_naive(lengths: Sequence[int], num_ranks: int, tokens_per_rank: int, tokens_multiple: int = 1) -> StepPlan:
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

    Raises:
        ValueError: a count is not positive, C is no multiple of ``tokens_multiple``, a sequence is empty, or a
            sequence does not fit on ``num_ranks * C`` tokens (the message gives the smallest C that fits).
    """
    sizes = _checked_lengths(lengths, num_ranks, tokens_per_rank, tokens_multiple)
    order = sorted(range(len(sizes)), key=lambda seq: (-sizes[seq], seq))
    num_long = sum(size > tokens_per_rank for size in sizes)
    if num_long and sizes[order[0]] > num_ranks * tokens_per_rank:
        raise ValueError(
            f"sequence {order[0]} has {sizes[order[0]]} tokens, more than {num_ranks} ranks of {tokens_per_rank} "
            f"tokens hold; raise the tokens per rank to at least "
            f"{_fitting(sizes[order[0]], num_ranks, tokens_multiple)}, or cut sequences with a smaller sequence length"
        )
    ranks: list[list[MicroBatch]] = [[] for _ in range(num_ranks)]
    loads = np.zeros(num_ranks, dtype=np.int64)
    for seq in order[:num_long]:
        width = -(-sizes[seq] // tokens_per_rank)
        start = _least_loaded_window(loads, width)
        for rank, shard in _ring_shards(seq, sizes[seq], start, width):
            ranks[rank].append(MicroBatch((shard,)))
            loads[rank] += shard.num_tokens
    packs = pack_best_fit(sizes, order[num_long:], tokens_per_rank)
    _place_packs(packs, sizes, ranks, loads)
    return StepPlan(num_ranks, tokens_per_rank, sizes, tuple(tuple(rank) for rank in ranks))


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
    sizes = _checked_lengths(lengths, num_ranks, tokens_per_rank, tokens_multiple)
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
    return StepPlan(num_ranks, tokens_per_rank, sizes, tuple(tuple(rank) for rank in ranks))


def _checked_lengths(
    lengths: Sequence[int], num_ranks: int, tokens_per_rank: int, tokens_multiple: int
) -> tuple[int, ...]:
    """The lengths as plain integers, once all arguments are known to be sound; raises ValueError otherwise."""
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
    sizes = tuple(int(length) for length in lengths)
    if sizes and min(sizes) < 1:
        seq = next(seq for seq, size in enumerate(sizes) if size < 1)
        raise ValueError(f"sequence {seq} has {sizes[seq]} tokens; drop it, a sequence needs at least 1")
    return sizes


def _fitting(length: int, num_ranks: int, tokens_multiple: int) -> int:
    """The smallest tokens per rank, a multiple of ``tokens_multiple``, with which ``num_ranks`` hold a sequence."""
    share = -(-length // num_ranks)
    return share + -share % tokens_multiple


def _ring_shards(seq: int, length: int, first_rank: int, width: int) -> list[tuple[int, Shard]]:
    """(rank, shard) of a sequence on ranks ``first_rank .. first_rank + width - 1``."""
    ring = tuple(range(first_rank, first_rank + width))
    return [(rank, Shard(seq, zigzag_ranges(length, width, index), ring)) for index, rank in enumerate(ring)]


def _least_loaded_window(loads: npt.NDArray[np.int64], width: int) -> int:
    """First rank of the window of ``width`` ranks with the smallest (maximum load, total load, first rank)."""
    highest, covered = loads, 1
    while covered < width:  # maximum over windows of `covered` ranks, doubled until it reaches the width
        step = min(covered, width - covered)
        highest = np.maximum(highest[:-step], highest[step:])
        covered += step
    candidates = np.flatnonzero(highest == highest.min())
    sums = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(loads)))
    totals = sums[candidates + width] - sums[candidates]
    return int(candidates[np.argmin(totals)])


def _place_packs(
    packs: Sequence[Sequence[int]],
    sizes: Sequence[int],
    ranks: list[list[MicroBatch]],
    loads: npt.NDArray[np.int64],
) -> None:
    """Append each pack, most tokens first, to the rank with the fewest tokens so far (tie: lowest rank)."""
    tokens = [sum(sizes[seq] for seq in pack) for pack in packs]
    heap = [(int(load), rank) for rank, load in enumerate(loads)]
    heapq.heapify(heap)
    for number in sorted(range(len(packs)), key=lambda number: (-tokens[number], number)):
        load, rank = heap[0]
        ring = (rank,)
        ranks[rank].append(MicroBatch(tuple(Shard(seq, ((0, sizes[seq]),), ring) for seq in packs[number])))
        heapq.heapreplace(heap, (load + tokens[number], rank))
