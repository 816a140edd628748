"""Layouts of the slices of a micro-batch: queries of one slice against the keys of all slices up to it.

Keys lie in one buffer of the whole micro-batch, sequence after sequence, each in the order of its slices, so that a
sequence's keys up to any slice are one interval. Of a sequence whose keys are kept the buffer holds those of all
members of the ring, one member after the other, each so. For a ring shard A and local documents, in two slices::

    buffer    | A of slice 0 | A of slice 1 | local line                          |
    slice 0   | A front back |              | doc  doc  do |                         rows of its tensors: A, local
    slice 1                  | A front back |              | c  doc  doc |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from bytescale_ext.attention.layout import AttentionLayout, KeptKeys, RingPass, block_of, ring_pass
from bytescale_ext.attention.rows import CuSeqlens, Rows
from bytescale_ext.plan.document_slices import DocumentSlices
from bytescale_ext.plan.shapes import zigzag_ranges
from bytescale_ext.plan.slices import slice_ranges


@dataclass(frozen=True, slots=True)
class SliceLayout:
    """The attention of one slice of a micro-batch on one rank.

    Attributes:
        index: which slice.
        num_slices: of the micro-batch.
        attention: queries of the slice against keys of the micro-batch.
        own: rows of the slice's keys in the buffer; they are the first rows of the slice's tensors, in order.
        num_keys: rows of the buffer.
    """

    index: int
    num_slices: int
    attention: AttentionLayout
    own: Rows
    num_keys: int

    @property
    def num_rows(self) -> int:
        """Rows of the slice's tensors."""
        return self.attention.num_rows


def slice_layouts(cut: DocumentSlices, rank: int, num_rows: Sequence[int]) -> tuple[SliceLayout, ...]:
    """The layout of each slice. Pure; no communication.

    Args:
        cut: where the micro-batch is cut.
        rank: my HDP rank.
        num_rows: rows of the tensors of each slice; what is beyond its tokens is padding.
    """
    regions = [0, *accumulate(_num_keys(cut, number) for number in range(len(cut.micro_batch.shards)))]
    begins = [_member_begins(cut, number, rank, regions[number]) for number in range(len(cut.ring_ends))]
    return tuple(_layout(cut, index, rank, num_rows[index], regions, begins) for index in range(cut.num_slices))


def _num_keys(cut: DocumentSlices, number: int) -> int:
    """Rows of the buffer that a shard needs."""
    return cut.ring_ends[number][-1] if number in cut.kept else cut.micro_batch.shards[number].num_tokens


def _member_begins(cut: DocumentSlices, number: int, rank: int, region: int) -> dict[int, int]:
    """Where the keys of each member of a shard's ring begin in the buffer: of all if they are kept, else mine alone."""
    ring = cut.micro_batch.shards[number].ring
    if number not in cut.kept:
        return {ring.index(rank): region}
    shares = (_share(cut.ring_ends[number], len(ring), member) for member in range(len(ring) - 1))
    return dict(enumerate(accumulate(shares, initial=region)))


def _layout(
    cut: DocumentSlices,
    index: int,
    rank: int,
    num_rows: int,
    regions: Sequence[int],
    begins: Sequence[dict[int, int]],
) -> SliceLayout:
    """The layout of one slice.

    Args:
        regions: where each shard's keys begin in the buffer, and where the last one's end.
        begins: of each ring shard, see ``_member_begins``.
    """
    num_rings = len(cut.ring_ends)
    shards = cut.micro_batch.shards[:num_rings]
    groups: dict[tuple[tuple[int, ...], bool], list[int]] = {}
    in_slice, in_buffer = [], []
    row = 0
    for number, shard in enumerate(shards):
        groups.setdefault((shard.ring, number in cut.kept), []).append(number)
        begin, own, stop = _member_keys(cut, index, number, shard.ring.index(rank), begins)
        in_slice.append((row, row + stop - own))
        in_buffer.append((own, stop))
        row += stop - own
    passes = []
    for (ring, is_kept), numbers in groups.items():
        ranges = [cut.ring_range(number, index) for number in numbers]
        if all(start == stop for start, stop in ranges):
            continue
        keys = [
            [_member_keys(cut, index, number, member, begins) for number in numbers]
            for member in (range(len(ring)) if is_kept else [ring.index(rank)])
        ]
        whole = tuple(Rows.of((begin, stop) for begin, _, stop in of_member) for of_member in keys)
        own_rows = tuple(Rows.of((own, stop) for _, own, stop in of_member) for of_member in keys)
        passes.append(
            ring_pass(
                [stop - start for start, stop in ranges],
                ring,
                ring.index(rank),
                [shards[number].seq for number in numbers],
                Rows.of(in_slice[number] for number in numbers),
                prefixes=[start for start, _ in ranges],
                keys=whole[ring.index(rank) if is_kept else 0],
                kept=KeptKeys(whole, own_rows) if is_kept else None,
            )
        )
    first, last = (regions[num_rings] + token for token in cut.local_range(index))
    documents = list(pairwise(regions[num_rings:]))
    pieces = [(begin, max(begin, first), min(end, last)) for begin, end in documents]
    layout = _with_local(num_rows, tuple(passes), row, [piece for piece in pieces if piece[1] < piece[2]])
    return SliceLayout(index, cut.num_slices, layout, Rows.of([*in_buffer, (first, last)]), regions[-1])


def _member_keys(
    cut: DocumentSlices, index: int, number: int, member: int, begins: Sequence[dict[int, int]]
) -> tuple[int, int, int]:
    """Rows of the buffer for a member of a ring: where its keys begin, where those of the slice do and where they end.

    ``begins``: see ``_member_begins``.
    """
    width = len(cut.micro_batch.shards[number].ring)
    start, stop = cut.ring_range(number, index)
    begin = begins[number][member]
    own = begin + start // width
    return begin, own, own + sum(b - a for a, b in zigzag_ranges(stop - start, width, member))


def _share(ends: Sequence[int], width: int, member: int) -> int:
    """Tokens of a member in all slices: in all but the last each member has as many."""
    before = ends[-2] if len(ends) > 1 else 0
    return before // width + sum(b - a for a, b in zigzag_ranges(ends[-1] - before, width, member))


def sample_layouts(lengths: Sequence[int], batch: int) -> tuple[SliceLayout, ...]:
    """The layout of each slice of a micro-batch of ``batch`` samples side by side, all cut alike.

    Args:
        lengths: tokens of each slice of a sample.

    Rows of a slice are those of its first sample, then those of the next; the buffer holds sample after sample.
    """
    num_tokens = sum(lengths)
    layouts = []
    for part in slice_ranges(lengths):
        starts = range(0, num_tokens * batch, num_tokens)
        pieces = [(start, start + part.start, start + part.stop) for start in starts]
        layout = _with_local(part.num_tokens * batch, (), 0, pieces)
        layouts.append(SliceLayout(part.index, len(lengths), layout, layout.local_keys, num_tokens * batch))
    return tuple(layouts)


def _with_local(
    num_rows: int, passes: tuple[RingPass, ...], row: int, pieces: Sequence[tuple[int, int, int]]
) -> AttentionLayout:
    """The layout with local documents from ``row`` on: of each, rows of the buffer where it begins and its piece."""
    local = CuSeqlens.of_lengths([stop - start for _, start, stop in pieces])
    keys = Rows.of((start, stop) for _, start, stop in pieces)
    rows = [(row + first, row + last) for first, last in pairwise(local.offsets)]
    began = [(mine, (begin, start)) for mine, (begin, start, _) in zip(rows, pieces, strict=True) if begin < start]
    prefix = block_of([mine for mine, _ in began], [before for _, before in began]) if began else None
    return AttentionLayout(num_rows, passes, row, local, keys, prefix)
