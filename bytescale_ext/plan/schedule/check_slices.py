"""Validators of slices: for samples of one length, and for micro-batches of documents.

They share no code with ``slices.py`` and ``document_slices.py``. They read the values that ranks run: the lengths of a
sample's slices, and the token ranges that each rank reads for each slice. Ranks can check their own micro-batches
without communication. Given all ranks of a ring, ``check_document_slices`` also proves that each token is read once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from bytescale_ext.errors import PlanError
from bytescale_ext.plan.schedule.document_slices import DocumentSlices
from bytescale_ext.plan.step.micro_batch import MicroBatch
from bytescale_ext.plan.step.sizes import Slicing

Ring = tuple[int, tuple[int, ...]]
"""A sequence and the ranks of its ring."""


def check_slices(lengths: Sequence[int], num_tokens: int, num_slices: int, multiple: int = 1) -> None:
    """Raise PlanError unless there are ``num_slices`` slices, none of them empty, with ``num_tokens`` in total.

    Each slice must be a multiple of ``multiple`` tokens. ``lengths``: tokens of each slice.
    """
    listed = ",".join(map(str, lengths))
    if len(lengths) != num_slices:
        raise PlanError(f"{len(lengths)} slices, not {num_slices}: {listed}")
    for index, length in enumerate(lengths):
        if length < 1 or length % multiple:
            raise PlanError(f"slice {index} has {length} tokens, not a positive multiple of {multiple}: {listed}")
    if sum(lengths) != num_tokens:
        raise PlanError(f"the slices have {sum(lengths)} tokens in total, not {num_tokens}: {listed}")


def check_document_slices(
    slices: Mapping[int, Sequence[DocumentSlices]], lengths: Sequence[int], slicing: Slicing, rows_multiple: int = 1
) -> None:
    """Raise PlanError, which names the rank and micro-batch, unless the slices satisfy every rule.

    1. There are ``slicing.num_slices`` slices. Their ends ascend to the end of each sequence and of the local line.
    2. A ring's inner ends are multiples of twice its ranks, and of ``rows_multiple`` rows on each rank. So all ranks
       hold equally many tokens of every slice except the last.
    3. The keys of a ring's sequence are kept on the device up to ``slicing.kept_tokens`` tokens, and in host memory up
       to ``slicing.swapped_tokens``. Their gradients travel with each slice beyond ``slicing.summed_tokens``.
    4. In each slice, a rank reads its zigzag share of each ring's tokens: a front part and the mirrored back part.
    5. Local documents are read once, token by token in the order of the line.
    6. The ranks of a ring slice its sequence alike. Together they read each of its tokens once, in the right slice.

    Args:
        slices: slices of the micro-batches of some ranks of one step, in order.
        lengths: tokens of each sequence of the step.
        slicing: the slicing of the step.
        rows_multiple: see ``SliceRule``.
    """
    rings: dict[Ring, dict[int, tuple[DocumentSlices, int]]] = {}
    for rank, rank_slices in slices.items():
        for index, sliced in enumerate(rank_slices):
            for fault in _faults(sliced, rank, lengths, slicing, rows_multiple):
                raise PlanError(f"micro-batch {index} of rank {rank}: {fault}\n{sliced}")
            for number, shard in enumerate(sliced.micro_batch.shards[: len(sliced.ring_ends)]):
                rings.setdefault((shard.seq, shard.ring), {})[rank] = sliced, number
    for ring, members in rings.items():
        for fault in _ring_faults(ring, members, slicing.num_slices):
            lines = (f"rank {rank}: {sliced}" for rank, (sliced, _) in members.items())
            raise PlanError("\n".join((fault, *lines)))


def _faults(
    sliced: DocumentSlices, rank: int, lengths: Sequence[int], slicing: Slicing, rows_multiple: int
) -> Iterator[str]:
    """Yield the faults of one sliced micro-batch of a rank, the most basic faults first."""
    shards, num_rings = sliced.micro_batch.shards, len(sliced.ring_ends)
    if [len(shard.ring) > 1 for shard in shards] != [True] * num_rings + [False] * (len(shards) - num_rings):
        yield f"ends for {num_rings} rings, which must be the first {len(shards)} shards"
    line = sum(stop - start for shard in shards[num_rings:] for start, stop in shard.ranges)
    ends = [*((f"sequence {s.seq}", e, lengths[s.seq]) for s, e in zip(shards, sliced.ring_ends, strict=False))]
    for name, row, last in (*ends, ("the local line", sliced.local_ends, line)):
        if len(row) != slicing.num_slices or row[-1] != last or sorted((0, *row)) != [0, *row]:
            yield f"ends {row} of {name} do not divide its {last} tokens into {slicing.num_slices} slices"
    for number, shard in enumerate(shards[:num_rings]):
        grain = math.lcm(2, rows_multiple) * len(shard.ring)
        if any(end % grain for end in sliced.ring_ends[number][:-1]):
            yield f"inner ends {sliced.ring_ends[number]} of sequence {shard.seq} are not multiples of {grain}"
    yield from _kept_key_faults(sliced, lengths, slicing)
    pieces = [sliced.slice(index, rank) for index in range(slicing.num_slices)]
    for number, shard in enumerate(shards[:num_rings]):
        yield from _share_faults(pieces, sliced.ring_ends[number], (shard.seq, shard.ring), rank)
    yield from _local_faults(pieces, sliced)
    if any(piece.offload != sliced.micro_batch.offload for piece in pieces):
        yield f"the offload share of slices differs from the micro-batch's {sliced.micro_batch.offload}"


def _kept_key_faults(sliced: DocumentSlices, lengths: Sequence[int], slicing: Slicing) -> Iterator[str]:
    """Yield the ring shards whose keys or gradient sums are stored in the wrong place."""
    tokens = [lengths[shard.seq] for shard in sliced.micro_batch.shards[: len(sliced.ring_ends)]]
    on_device = {number for number, length in enumerate(tokens) if length <= slicing.kept_tokens}
    in_host = {number for number, length in enumerate(tokens) if length <= slicing.swapped_tokens} - on_device
    kept = on_device | in_host
    sent = {number for number in kept if tokens[number] > slicing.summed_tokens}
    for name, actual, expected in (
        ("keys are kept", sliced.kept, kept),
        ("keys are swapped to host memory", sliced.swapped, in_host),
        ("gradient sums travel", sliced.sent_sums, sent),
    ):
        if actual != expected:
            yield f"{name} for shards {sorted(actual)}, but the lengths require shards {sorted(expected)}"


def _share_faults(pieces: Sequence[MicroBatch], ends: Sequence[int], ring: Ring, rank: int) -> Iterator[str]:
    """Yield the faults of a rank's shares of a ring. A share is a front part, then the mirrored back part."""
    seq, ranks = ring
    member, start = ranks.index(rank), 0
    for index, (piece, stop) in enumerate(zip(pieces, ends, strict=True)):
        ranges = _ranges(piece, ring)
        num_tokens, width = sum(b - a for a, b in ranges), len(ranks)
        part = (stop - start) // (2 * width)
        share = [
            (start + member * part, start + (member + 1) * part),
            (stop - (member + 1) * part, stop - member * part),
        ]
        is_last = index == len(pieces) - 1
        if not is_last and list(ranges) != (share if part else []):
            yield f"slice {index} of sequence {seq}: rank {rank} reads {ranges}, but its share is {share}"
        if is_last and not (stop - start) // width <= num_tokens <= -(-(stop - start) // width):
            yield f"slice {index} of sequence {seq}: rank {rank} reads {num_tokens} of {stop - start} tokens"
        start = stop


def _local_faults(pieces: Sequence[MicroBatch], sliced: DocumentSlices) -> Iterator[str]:
    """Yield the faults of local documents, which must be read once, in order, up to each slice's end."""
    documents = [shard for shard in sliced.micro_batch.shards if len(shard.ring) == 1]
    expected = [(shard.seq, token) for shard in documents for a, b in shard.ranges for token in (a, b - 1) if b > a]
    read: list[tuple[int, int, int]] = []  # sequence, start, stop; joined if a document continues in the next slice
    num_tokens = 0
    for index, piece in enumerate(pieces):
        for shard in piece.shards:
            for start, stop in shard.ranges if len(shard.ring) == 1 else ():
                num_tokens += stop - start
                continues = bool(read) and read[-1][0] == shard.seq and read[-1][2] == start
                begin = read.pop()[1] if continues else start
                read.append((shard.seq, begin, stop))
        if num_tokens != sliced.local_ends[index]:
            yield f"slices up to {index} read {num_tokens} tokens of local documents, not {sliced.local_ends[index]}"
    if [(seq, token) for seq, start, stop in read for token in (start, stop - 1)] != expected:
        yield f"local documents are read as {read}"


def _ring_faults(ring: Ring, members: Mapping[int, tuple[DocumentSlices, int]], num_slices: int) -> Iterator[str]:
    """Yield the disagreements of a ring's ranks, and the slices whose tokens they do not read exactly once."""
    seq, ranks = ring
    ends = {sliced.ring_ends[number] for sliced, number in members.values()}
    if len(ends) > 1:
        yield f"ranks {sorted(members)} slice sequence {seq} differently"
    if len({number in sliced.kept for sliced, number in members.values()}) > 1:
        yield f"ranks {sorted(members)} disagree on keeping the keys of sequence {seq}"
    if len({number in sliced.sent_sums for sliced, number in members.values()}) > 1:
        yield f"ranks {sorted(members)} disagree on keeping the gradient sums of sequence {seq}"
    if len({number in sliced.swapped for sliced, number in members.values()}) > 1:
        yield f"ranks {sorted(members)} disagree on swapping the keys of sequence {seq}"
    if set(members) != set(ranks):
        return
    start = 0
    for index, stop in zip(range(num_slices), next(iter(ends)), strict=True):
        pieces = (sliced.slice(index, rank) for rank, (sliced, _) in members.items())
        ranges = sorted(pair for piece in pieces for pair in _ranges(piece, ring))
        bounds = [start, *(bound for pair in ranges for bound in pair), stop]
        if bounds[::2] != bounds[1::2]:
            yield f"slice {index} of sequence {seq}: its ranks read {ranges}, which are not tokens {start} to {stop}"
        start = stop


def _ranges(piece: MicroBatch, ring: Ring) -> tuple[tuple[int, int], ...]:
    """Return the token ranges of a ring's sequence in a slice."""
    return tuple(pair for shard in piece.shards if (shard.seq, shard.ring) == ring for pair in shard.ranges)
