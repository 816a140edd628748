"""Layouts of the slices of a micro-batch: queries of one slice over the keys of all slices up to it.

The keys of a micro-batch are numbered shard after shard, each shard in the order of its slices. So the keys of a shard
up to any slice are one interval of rows. If the keys of a sequence are kept, its rows are the keys of all members of
the ring, one member after the other. Each slice stores the rows that it adds (``RowParts``); rows of swapped sequences
are in a separate part. For a ring shard A and local documents, in two slices::

    keys      | A of slice 0 | A of slice 1 | local line                          |
    slice 0   | A front back |              | doc  doc  do |                         rows of its tensors: A, local
    slice 1                  | A front back |              | c  doc  doc |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise

from bytescale_ext.attention.layouts.blocks import PlacedBlock
from bytescale_ext.attention.layouts.layout import (
    AttentionLayout,
    KeptKeys,
    PrefixKeys,
    RingPass,
    ring_pass,
    zigzag_share,
)
from bytescale_ext.attention.layouts.route import Route
from bytescale_ext.attention.layouts.rows import CuSeqlens, PartRows, Rows
from bytescale_ext.attention.layouts.window import WindowPass, WindowSequence, is_limited, window_pass
from bytescale_ext.plan.schedule.document_slices import DocumentSlices
from bytescale_ext.plan.schedule.slices import slice_ranges


@dataclass(frozen=True, slots=True)
class SliceLayout:
    """The attention of one slice of a micro-batch on one rank.

    Attributes:
        index: number of the slice.
        num_slices: number of slices of the micro-batch.
        attention: layout of the queries of the slice over the keys of the micro-batch.
        own: rows of the slice's own keys in the micro-batch. They are the first rows of the slice's tensors, in this
            order.
        held: rows that each slice, up to this slice, adds on the device: its own keys, and the keys that it keeps of
            other members of its rings.
        swapped: rows that each slice, up to this slice, adds in host memory; no places if the micro-batch swaps no
            keys.
        keys: places of ``held``, then places of ``swapped``.
        summed: rows that each slice, up to this slice, adds to the sums of gradients on this rank.
    """

    index: int
    num_slices: int
    attention: AttentionLayout
    own: Rows
    held: PartRows
    swapped: PartRows
    keys: PartRows
    summed: PartRows

    @property
    def num_rows(self) -> int:
        """Number of rows of the slice's tensors."""
        return self.attention.num_rows


def slice_layouts(
    slices: DocumentSlices, rank: int, num_rows: Sequence[int], window: int | None = None
) -> tuple[SliceLayout, ...]:
    """Return the layout of each slice. Pure; no communication.

    A rank keeps no keys of other members for sequences that the window limits.

    Args:
        slices: slices of the micro-batch.
        rank: HDP rank.
        num_rows: rows of the tensors of each slice; the rows after its tokens are padding.
        window: the most keys before its own key that a token sees; None for all.
    """
    keys = _KeyRows(slices, rank, window)
    layouts: list[SliceLayout] = []
    for index in range(slices.num_slices):
        layouts.append(_layout(keys, index, num_rows[index], layouts[-1] if layouts else None))
    return tuple(layouts)


class _KeyRows:
    """Rows of a micro-batch's keys by shard, member and slice.

    Attributes:
        slices: slices of the micro-batch, with kept keys only for sequences that the window does not limit.
        window: see ``slice_layouts``.
        limited: numbers of the ring shards that the window limits.
        num_rings: number of ring shards, which come first.
        first_rows: first row of each shard, then the total number of rows.
    """

    def __init__(self, slices: DocumentSlices, rank: int, window: int | None) -> None:
        lengths = [ends[-1] for ends in slices.ring_ends]
        self.limited = frozenset(number for number, length in enumerate(lengths) if is_limited(length, window))
        kept, sent, swapped = (numbers - self.limited for numbers in (slices.kept, slices.sent_sums, slices.swapped))
        self.slices = slices = replace(slices, kept=kept, sent_sums=sent, swapped=swapped)
        self.window = window
        self.num_rings = len(lengths)
        self._rank = rank
        sizes = (
            lengths[number] if number in kept else shard.num_tokens
            for number, shard in enumerate(slices.micro_batch.shards)
        )
        self.first_rows = tuple(accumulate(sizes, initial=0))
        self._begins = [self._member_begins(number) for number in range(self.num_rings)]

    def ring(self, number: int) -> tuple[int, ...]:
        """Return the ring of a shard."""
        return self.slices.micro_batch.shards[number].ring

    def route(self, number: int) -> Route:
        """Return the route of keys round the ring of a shard."""
        return Route(self.ring(number), self.place(number), self.slices.micro_batch.shards[number].inner_rings)

    def place(self, number: int) -> int:
        """Return the index of this rank in the ring of a shard."""
        return self.ring(number).index(self._rank)

    def member_keys(self, index: int, number: int, member: int) -> tuple[int, int, int]:
        """Return three rows of a member's keys: their start, the start of slice ``index``, and the end of the slice."""
        width = len(self.ring(number))
        start, stop = self.slices.ring_range(number, index)
        begin = self._begins[number][member]
        own = begin + start // width
        return begin, own, own + zigzag_share(stop - start, width, member)

    def added_rows(self, index: int, number: int, of_all: bool) -> list[tuple[int, int]]:
        """Return the rows of a ring shard's keys in slice ``index``, of all members or only of this rank."""
        members = range(len(self.ring(number))) if of_all else [self.place(number)]
        return [self.member_keys(index, number, member)[1:] for member in members]

    def _member_begins(self, number: int) -> dict[int, int]:
        """Return the first row of each member's keys: of all members if their keys are kept, else only of this rank."""
        if number not in self.slices.kept:
            return {self.place(number): self.first_rows[number]}
        # In all slices except the last, the members have equal numbers of tokens.
        ends, width = self.slices.ring_ends[number], len(self.ring(number))
        before = ends[-2] if len(ends) > 1 else 0
        shares = (before // width + zigzag_share(ends[-1] - before, width, member) for member in range(width - 1))
        return dict(enumerate(accumulate(shares, initial=self.first_rows[number])))


def _layout(keys: _KeyRows, index: int, num_rows: int, before: SliceLayout | None) -> SliceLayout:
    """Return the layout of slice ``index``.

    Args:
        keys: rows of the keys of the micro-batch.
        index: number of the slice.
        num_rows: rows of the slice's tensors.
        before: layout of the previous slice.
    """
    slices = keys.slices
    rings = range(keys.num_rings)
    own_rows = [keys.member_keys(index, number, keys.place(number))[1:] for number in rings]
    in_slice = CuSeqlens.of_lengths([stop - start for start, stop in own_rows])
    windows, passes = _passes(keys, index, list(pairwise(in_slice.offsets)))
    first, last = (keys.first_rows[keys.num_rings] + token for token in slices.local_range(index))
    documents = pairwise(keys.first_rows[keys.num_rings :])
    pieces = [(begin, max(begin, first), min(end, last)) for begin, end in documents]
    pieces = [piece for piece in pieces if piece[1] < piece[2]]
    layout = _with_local(num_rows, passes, in_slice.num_tokens, pieces, keys.window)
    added = {number: keys.added_rows(index, number, number in slices.kept) for number in rings}
    sums = [keys.added_rows(index, number, number in slices.kept - slices.sent_sums) for number in rings]
    on_device = [rows for number, rows in added.items() if number not in slices.swapped]
    in_host = [rows for number, rows in added.items() if number in slices.swapped]
    held = _with_part(before.held if before else None, [*on_device, [(first, last)]])
    swapped = _with_part(before.swapped if before else None, in_host) if slices.swapped else PartRows(())
    return SliceLayout(
        index,
        slices.num_slices,
        replace(layout, windows=windows),
        Rows.of([*own_rows, (first, last)]),
        held,
        swapped,
        PartRows(held.places + swapped.places) if slices.swapped else held,
        _with_part(before.summed if before else None, [*sums, [(first, last)]]),
    )


def _passes(
    keys: _KeyRows, index: int, in_slice: Sequence[tuple[int, int]]
) -> tuple[tuple[WindowPass, ...], tuple[RingPass, ...]]:
    """Return the passes of slice ``index`` with and without a window.

    ``in_slice``: rows of each ring shard in the slice.
    """
    slices = keys.slices
    groups: dict[tuple[Route, bool, bool, bool], list[int]] = {}
    for number in range(keys.num_rings):
        group = (keys.route(number), number in keys.limited, number in slices.kept, number in slices.sent_sums)
        groups.setdefault(group, []).append(number)
    windows: list[WindowPass] = []
    passes: list[RingPass] = []
    for numbers in groups.values():
        rows = Rows.of(in_slice[number] for number in numbers)
        if not any(start < stop for start, stop in (slices.ring_range(number, index) for number in numbers)):
            continue
        if numbers[0] in keys.limited:
            windows.append(_slice_window(keys, index, numbers, rows))
        else:
            passes.append(_slice_pass(keys, index, numbers, rows))
    return tuple(windows), tuple(passes)


def _with_part(before: PartRows | None, rows: Sequence[list[tuple[int, int]]]) -> PartRows:
    """Return the parts of the earlier slices, and an additional part with ``rows``."""
    return PartRows((*(before.places if before else ()), Rows.of(sorted(chain.from_iterable(rows)))))


def _slice_window(keys: _KeyRows, index: int, numbers: Sequence[int], in_slice: Rows) -> WindowPass:
    """Return the pass of slice ``index`` for the shards ``numbers``, which share a ring and are limited by a window."""
    assert keys.window is not None, f"{numbers=}"
    shards, ends = keys.slices.micro_batch.shards, keys.slices.ring_ends
    sequences = [
        WindowSequence(shards[number].seq, ends[number][: index + 1], keys.first_rows[number]) for number in numbers
    ]
    return window_pass(sequences, keys.route(numbers[0]), in_slice, keys.window)


def _slice_pass(keys: _KeyRows, index: int, numbers: Sequence[int], in_slice: Rows) -> RingPass:
    """Return the pass of slice ``index`` for the shards ``numbers``, which share a ring and are all kept or not."""
    slices = keys.slices
    route, is_kept = keys.route(numbers[0]), numbers[0] in slices.kept
    ranges = [slices.ring_range(number, index) for number in numbers]
    whole: dict[int, Rows] = {}
    own: dict[int, Rows] = {}
    for member in range(route.width) if is_kept else [route.index]:
        member_keys = [keys.member_keys(index, number, member) for number in numbers]
        whole[member] = Rows.of((begin, stop) for begin, _, stop in member_keys)
        own[member] = Rows.of((start, stop) for _, start, stop in member_keys)
    return ring_pass(
        [stop - start for start, stop in ranges],
        route,
        [slices.micro_batch.shards[number].seq for number in numbers],
        in_slice,
        PrefixKeys(
            tuple(start for start, _ in ranges),
            whole[route.index],
            KeptKeys(tuple(whole.values()), tuple(own.values()), numbers[0] in slices.sent_sums) if is_kept else None,
        ),
    )


def sample_layouts(lengths: Sequence[int], batch: int, window: int | None = None) -> tuple[SliceLayout, ...]:
    """Return the layout of each slice of a micro-batch of ``batch`` samples, which are all sliced in the same way.

    The rows of a slice are the slice's part of each sample, sample after sample. Keys are numbered sample after sample.

    Args:
        lengths: number of tokens of each slice of a sample.
        batch: number of samples.
        window: see ``slice_layouts``.
    """
    num_tokens = sum(lengths)
    layouts: list[SliceLayout] = []
    for part in slice_ranges(lengths):
        starts = range(0, num_tokens * batch, num_tokens)
        pieces = [(start, start + part.start, start + part.stop) for start in starts]
        layout = _with_local(part.num_tokens * batch, (), 0, pieces, window)
        held = PartRows((*(layouts[-1].held.places if layouts else ()), layout.local_keys))
        layouts.append(SliceLayout(part.index, len(lengths), layout, layout.local_keys, held, PartRows(()), held, held))
    return tuple(layouts)


def _with_local(
    num_rows: int, passes: tuple[RingPass, ...], row: int, pieces: Sequence[tuple[int, int, int]], window: int | None
) -> AttentionLayout:
    """Return a layout with pieces of local documents from ``row`` on.

    ``pieces``: three rows of the keys for each document: its start, the start of its piece, and the end of its piece.
    """
    local = CuSeqlens.of_lengths([stop - start for _, start, stop in pieces])
    keys = Rows.of((start, stop) for _, start, stop in pieces)
    rows = [(row + first, row + last) for first, last in pairwise(local.offsets)]
    if window is not None:
        visible = [(max(begin, start - window), stop) for begin, start, stop in pieces]
        return AttentionLayout(num_rows, passes, row, local, keys, None, PlacedBlock.in_window(rows, visible, window))
    prefix = PlacedBlock.of(rows, [(begin, start) for begin, start, _ in pieces])
    return AttentionLayout(num_rows, passes, row, local, keys, None if prefix.is_empty else prefix)
