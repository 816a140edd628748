"""Validators of slices: of samples of one length, and of micro-batches of documents.

They share no code with ``slices.py`` and ``document_slices.py``. They read the values that ranks run: the lengths of a
sample's slices, and the token ranges that each rank reads for each slice. Ranks can check their own micro-batches
without communication; with all ranks of a ring, ``check_document_slices`` also proves that each token is read once.
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
    """Check the slices of a sample, or raise PlanError with the lengths.

    There are ``num_slices``, none is empty, each is a multiple of ``multiple`` tokens, and together they are all
    ``num_tokens``.
    """
    listed = ",".join(map(str, lengths))
    if len(lengths) != num_slices:
        raise PlanError(f"{len(lengths)} slices, not {num_slices}: {listed}")
    for index, length in enumerate(lengths):
        if length < 1 or length % multiple:
            raise PlanError(f"slice {index} has {length} tokens, not a positive multiple of {multiple}: {listed}")
    if sum(lengths) != num_tokens:
        raise PlanError(f"slices of {sum(lengths)} tokens together, not {num_tokens}: {listed}")


def check_document_slices(
    cuts: Mapping[int, Sequence[DocumentSlices]], lengths: Sequence[int], slicing: Slicing, rows_multiple: int = 1
) -> None:
    """Check how micro-batches of documents are cut, or raise PlanError with the rank, the micro-batch and its cut.

    1. Each cut has ``slicing.num_slices`` slices, whose ends ascend to the end of each sequence and of the local line.
    2. A ring's inner ends are multiples of twice its ranks and of ``rows_multiple`` rows on each rank, so that all
       ranks hold equally many tokens of every slice but the last one.
    3. The keys of a ring's sequence are kept on the device if it has at most ``slicing.kept_tokens`` tokens, else in
       host memory if it has at most ``slicing.swapped_tokens``. The sums of their gradients travel with each slice if
       it has more than ``slicing.summed_tokens``.
    4. In each slice a rank reads its zigzag share of each ring's tokens: a front part and the mirrored back part.
    5. Local documents are read once, token by token in the order of the line.
    6. Ranks of one ring cut its sequence alike and together read each of its tokens once, in the right slice.

    Args:
        cuts: of the micro-batches of some ranks of one step, in order.
        lengths: tokens of each sequence of the step.
        slicing: number of slices and kept tokens.
        rows_multiple: see ``SliceRule``.
    """
    rings: dict[Ring, dict[int, tuple[DocumentSlices, int]]] = {}
    for rank, row in cuts.items():
        for index, cut in enumerate(row):
            where = f"micro-batch {index} of rank {rank}"
            for what in _faults(cut, rank, lengths, slicing, rows_multiple):
                raise PlanError(f"{where}: {what}\n{cut}")
            for number, shard in enumerate(cut.micro_batch.shards[: len(cut.ring_ends)]):
                rings.setdefault((shard.seq, shard.ring), {})[rank] = cut, number
    for ring, members in rings.items():
        for what in _ring_faults(ring, members, slicing.num_slices):
            raise PlanError(f"{what}\n" + "\n".join(f"rank {rank}: {cut}" for rank, (cut, _) in members.items()))


def _faults(
    cut: DocumentSlices, rank: int, lengths: Sequence[int], slicing: Slicing, rows_multiple: int
) -> Iterator[str]:
    """Yield what is wrong with the cut of one micro-batch of a rank, the most basic faults first."""
    shards, num_rings = cut.micro_batch.shards, len(cut.ring_ends)
    if [len(shard.ring) > 1 for shard in shards] != [True] * num_rings + [False] * (len(shards) - num_rings):
        yield f"ends for {num_rings} rings, which must be the first {len(shards)} shards"
    line = sum(stop - start for shard in shards[num_rings:] for start, stop in shard.ranges)
    ends = [*((f"sequence {s.seq}", e, lengths[s.seq]) for s, e in zip(shards, cut.ring_ends, strict=False))]
    for name, row, last in (*ends, ("the local line", cut.local_ends, line)):
        if len(row) != slicing.num_slices or row[-1] != last or sorted((0, *row)) != [0, *row]:
            yield f"ends {row} of {name} do not make {slicing.num_slices} slices of its {last} tokens"
    for number, shard in enumerate(shards[:num_rings]):
        grain = math.lcm(2, rows_multiple) * len(shard.ring)
        if any(end % grain for end in cut.ring_ends[number][:-1]):
            yield f"inner ends {cut.ring_ends[number]} of sequence {shard.seq} are not multiples of {grain}"
    on_device = {n for n in range(num_rings) if lengths[shards[n].seq] <= slicing.kept_tokens}
    in_host = {n for n in range(num_rings) if lengths[shards[n].seq] <= slicing.swapped_tokens} - on_device
    small = on_device | in_host
    if cut.kept != small:
        yield f"keys are kept of shards {sorted(cut.kept)}, but sequences of {sorted(small)} are short enough"
    if cut.swapped != in_host:
        yield f"keys are swapped of shards {sorted(cut.swapped)}, but those of {sorted(in_host)} are for host memory"
    long = {number for number in small if lengths[shards[number].seq] > slicing.summed_tokens}
    if cut.sent_sums != long:
        yield f"sums travel of shards {sorted(cut.sent_sums)}, but kept sequences of {sorted(long)} are long enough"
    pieces = [cut.slice(index, rank) for index in range(slicing.num_slices)]
    for number, shard in enumerate(shards[:num_rings]):
        yield from _share_faults(pieces, cut.ring_ends[number], (shard.seq, shard.ring), rank)
    yield from _local_faults(pieces, cut)
    if any(piece.offload != cut.micro_batch.offload for piece in pieces):
        yield f"slices with another offload share than the micro-batch's {cut.micro_batch.offload}"


def _share_faults(pieces: Sequence[MicroBatch], ends: Sequence[int], ring: Ring, rank: int) -> Iterator[str]:
    """Yield what is wrong with a rank's shares of a ring: a front part, then the mirrored back part."""
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
            yield f"slice {index} of sequence {seq}: rank {rank} reads {ranges}, its share is {share}"
        if is_last and not (stop - start) // width <= num_tokens <= -(-(stop - start) // width):
            yield f"slice {index} of sequence {seq}: rank {rank} reads {num_tokens} of {stop - start} tokens"
        start = stop


def _local_faults(pieces: Sequence[MicroBatch], cut: DocumentSlices) -> Iterator[str]:
    """Yield what is wrong with the local documents: they are read once, in order, up to each slice's end."""
    documents = [shard for shard in cut.micro_batch.shards if len(shard.ring) == 1]
    wanted = [(shard.seq, token) for shard in documents for a, b in shard.ranges for token in (a, b - 1) if b > a]
    read: list[tuple[int, int, int]] = []  # sequence, start, stop, joined where one continues in the next slice
    num_tokens = 0
    for index, piece in enumerate(pieces):
        for shard in piece.shards:
            for start, stop in shard.ranges if len(shard.ring) == 1 else ():
                num_tokens += stop - start
                goes_on = bool(read) and read[-1][0] == shard.seq and read[-1][2] == start
                begin = read.pop()[1] if goes_on else start
                read.append((shard.seq, begin, stop))
        if num_tokens != cut.local_ends[index]:
            yield f"slices up to {index} read {num_tokens} tokens of local documents, not {cut.local_ends[index]}"
    if [(seq, token) for seq, start, stop in read for token in (start, stop - 1)] != wanted:
        yield f"local documents are read as {read}"


def _ring_faults(ring: Ring, members: Mapping[int, tuple[DocumentSlices, int]], num_slices: int) -> Iterator[str]:
    """Yield where ranks of a ring disagree, or where all of them together do not read each token once."""
    seq, ranks = ring
    ends = {cut.ring_ends[number] for cut, number in members.values()}
    if len(ends) > 1:
        yield f"ranks {sorted(members)} cut sequence {seq} differently"
    if len({number in cut.kept for cut, number in members.values()}) > 1:
        yield f"ranks {sorted(members)} disagree on keeping the keys of sequence {seq}"
    if len({number in cut.sent_sums for cut, number in members.values()}) > 1:
        yield f"ranks {sorted(members)} disagree on keeping the gradient sums of sequence {seq}"
    if len({number in cut.swapped for cut, number in members.values()}) > 1:
        yield f"ranks {sorted(members)} disagree on swapping the keys of sequence {seq}"
    if set(members) != set(ranks):
        return
    start = 0
    for index, stop in zip(range(num_slices), next(iter(ends)), strict=True):
        ranges = sorted(one for rank, (cut, _) in members.items() for one in _ranges(cut.slice(index, rank), ring))
        bounds = [start, *(bound for one in ranges for bound in one), stop]
        if bounds[::2] != bounds[1::2]:
            yield f"slice {index} of sequence {seq}: its ranks read {ranges}, together not tokens {start} to {stop}"
        start = stop


def _ranges(piece: MicroBatch, ring: Ring) -> tuple[tuple[int, int], ...]:
    """Return the token ranges of a ring's sequence in a slice."""
    return tuple(one for shard in piece.shards if (shard.seq, shard.ring) == ring for one in shard.ranges)
