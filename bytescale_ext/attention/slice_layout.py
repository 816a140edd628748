"""Layouts of the slices of a micro-batch: queries of one slice against the keys of all slices up to it.

Keys lie in one buffer of the whole micro-batch, sequence after sequence, each in the order of its slices, so that a
sequence's keys up to any slice are one interval. For a ring shard A and local documents, in two slices::

    buffer    | A of slice 0 | A of slice 1 | local line                          |
    slice 0   | A front back |              | doc  doc  do |                         rows of its tensors: A, local
    slice 1                  | A front back |              | c  doc  doc |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from bytescale_ext.attention.layout import AttentionLayout, CuSeqlens, RingPass, block_of, ring_pass
from bytescale_ext.attention.rows import Rows
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
    regions = [0, *accumulate(shard.num_tokens for shard in cut.micro_batch.shards)]
    return tuple(_layout(cut, index, rank, num_rows[index], regions) for index in range(cut.num_slices))


def _layout(cut: DocumentSlices, index: int, rank: int, num_rows: int, regions: Sequence[int]) -> SliceLayout:
    """``regions``: where each shard's keys begin in the buffer, and where the last one's end."""
    num_rings = len(cut.ring_ends)
    shards = cut.micro_batch.shards[:num_rings]
    groups: dict[tuple[int, ...], list[int]] = {}
    in_slice, in_buffer = [], []
    row = 0
    for number, shard in enumerate(shards):
        groups.setdefault(shard.ring, []).append(number)
        start, stop = cut.ring_range(number, index)
        share = zigzag_ranges(stop - start, len(shard.ring), shard.ring.index(rank))
        num_tokens = sum(b - a for a, b in share)
        in_slice.append((row, row + num_tokens))
        begin = regions[number] + start // len(shard.ring)
        in_buffer.append((begin, begin + num_tokens))
        row += num_tokens
    passes = []
    for ring, numbers in groups.items():
        ranges = [cut.ring_range(number, index) for number in numbers]
        if all(start == stop for start, stop in ranges):
            continue
        passes.append(
            ring_pass(
                [stop - start for start, stop in ranges],
                ring,
                ring.index(rank),
                [shards[number].seq for number in numbers],
                Rows.of(in_slice[number] for number in numbers),
                prefixes=[start for start, _ in ranges],
                keys=Rows.of((regions[number], in_buffer[number][1]) for number in numbers),
            )
        )
    first, last = (regions[num_rings] + token for token in cut.local_range(index))
    documents = list(pairwise(regions[num_rings:]))
    pieces = [(begin, max(begin, first), min(end, last)) for begin, end in documents]
    layout = _with_local(num_rows, tuple(passes), row, [piece for piece in pieces if piece[1] < piece[2]])
    return SliceLayout(index, cut.num_slices, layout, Rows.of([*in_buffer, (first, last)]), regions[-1])


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
