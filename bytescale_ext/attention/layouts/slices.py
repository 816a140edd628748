"""Layouts of the slices of a micro-batch: queries of one slice against the keys of all slices up to it.

The keys of a micro-batch are numbered shard after shard, each in the order of its slices, so that the keys of a shard
up to any slice are one interval of rows. Where the keys of a sequence are kept, its rows are the keys of all members of
the ring, one member after the other. Each slice holds the rows that it adds (``RowParts``), those of sequences whose
keys are swapped in a part of their own. For a ring shard A and local documents, in two slices::

    keys      | A of slice 0 | A of slice 1 | local line                          |
    slice 0   | A front back |              | doc  doc  do |                         rows of its tensors: A, local
    slice 1                  | A front back |              | c  doc  doc |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise

from bytescale_ext.attention.layouts.blocks import PlacedBlock
from bytescale_ext.attention.layouts.layout import AttentionLayout, KeptKeys, PrefixKeys, RingPass, ring_pass
from bytescale_ext.attention.layouts.route import Route
from bytescale_ext.attention.layouts.rows import CuSeqlens, PartRows, Rows
from bytescale_ext.attention.layouts.window import WindowPass, WindowSequence, is_limited, window_pass
from bytescale_ext.plan.schedule.document_slices import DocumentSlices
from bytescale_ext.plan.schedule.slices import slice_ranges
from bytescale_ext.plan.step.micro_batch import zigzag_ranges


@dataclass(frozen=True, slots=True)
class SliceLayout:
    """The attention of one slice of a micro-batch on one rank.

    Attributes:
        index: number of the slice.
        num_slices: slices of the micro-batch.
        attention: queries of the slice against keys of the micro-batch.
        own: rows of the slice's keys in the micro-batch; in the slice's tensors they are the first rows, in this order.
        held: rows of the micro-batch that each slice up to this one adds: its own keys, and those that it keeps of
            other members of its rings; without those in host memory.
        swapped: rows that each slice adds in host memory; no places in a micro-batch that swaps none.
        keys: the places of ``held``, then those of ``swapped``.
        summed: the rows whose gradients are summed on this rank over the backward passes of slices.
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
        """Rows of the slice's tensors."""
        return self.attention.num_rows


def slice_layouts(
    cut: DocumentSlices, rank: int, num_rows: Sequence[int], window: int | None = None
) -> tuple[SliceLayout, ...]:
    """Return the layout of each slice. Pure; no communication.

    With a window, a rank keeps no keys of other members of the sequences that it limits.

    Args:
        cut: where the micro-batch is cut.
        rank: my HDP rank.
        num_rows: rows of the tensors of each slice; the rows after its tokens are padding.
        window: the most keys before its own that a token sees; None: all.
    """
    keys = _KeyRows(cut, rank, window)
    layouts: list[SliceLayout] = []
    for index in range(cut.num_slices):
        layouts.append(_layout(keys, index, num_rows[index], layouts[-1] if layouts else None))
    return tuple(layouts)


class _KeyRows:
    """Which rows of a micro-batch's keys are those of each shard, member and slice.

    Attributes:
        cut: where the micro-batch is cut, and which keys are kept.
        window: see ``slice_layouts``.
        limited: numbers of the ring shards that the window limits.
        num_rings: how many of its shards are ring shards; they come first.
        regions: the first row of each shard, then the number of rows.
    """

    def __init__(self, cut: DocumentSlices, rank: int, window: int | None) -> None:
        ends = enumerate(cut.ring_ends)
        self.limited = frozenset(number for number, of_shard in ends if is_limited(of_shard[-1], window))
        kept, sent, swapped = (numbers - self.limited for numbers in (cut.kept, cut.sent_sums, cut.swapped))
        self.cut = cut = replace(cut, kept=kept, sent_sums=sent, swapped=swapped)
        self.window = window
        self.num_rings = len(cut.ring_ends)
        self._rank = rank
        sizes = (
            cut.ring_ends[number][-1] if number in cut.kept else shard.num_tokens
            for number, shard in enumerate(cut.micro_batch.shards)
        )
        self.regions = tuple(accumulate(sizes, initial=0))
        self._begins = [self._member_begins(number) for number in range(self.num_rings)]

    def ring(self, number: int) -> tuple[int, ...]:
        """Return the ring of a shard."""
        return self.cut.micro_batch.shards[number].ring

    def route(self, number: int) -> Route:
        """Return the way of keys round the ring of a shard."""
        return Route(self.ring(number), self.place(number), self.cut.micro_batch.shards[number].inner_rings)

    def place(self, number: int) -> int:
        """Return my place in the ring of a shard."""
        return self.ring(number).index(self._rank)

    def member_keys(self, index: int, number: int, member: int) -> tuple[int, int, int]:
        """Return three rows of a member's keys: where they begin, where slice ``index`` begins and where it ends."""
        width = len(self.ring(number))
        start, stop = self.cut.ring_range(number, index)
        begin = self._begins[number][member]
        own = begin + start // width
        return begin, own, own + _share(stop - start, width, member)

    def added_rows(self, index: int, number: int, of_all: bool) -> list[tuple[int, int]]:
        """Return the rows of a ring shard's keys in slice ``index``: of all members, or of this rank alone."""
        members = range(len(self.ring(number))) if of_all else [self.place(number)]
        return [self.member_keys(index, number, member)[1:] for member in members]

    def _member_begins(self, number: int) -> dict[int, int]:
        """Return where each member's keys begin: of all members if they are kept, else of this rank alone."""
        if number not in self.cut.kept:
            return {self.place(number): self.regions[number]}
        # In all slices but the last, every member has equally many tokens.
        ends, width = self.cut.ring_ends[number], len(self.ring(number))
        before = ends[-2] if len(ends) > 1 else 0
        shares = (before // width + _share(ends[-1] - before, width, member) for member in range(width - 1))
        return dict(enumerate(accumulate(shares, initial=self.regions[number])))


def _layout(keys: _KeyRows, index: int, num_rows: int, before: SliceLayout | None) -> SliceLayout:
    """Return the layout of slice ``index``.

    Args:
        keys: rows of the keys of the micro-batch.
        index: number of the slice.
        num_rows: rows of its tensors.
        before: the layout of the slice before it.
    """
    cut, regions = keys.cut, keys.regions
    groups: dict[tuple[Route, bool, bool, bool], list[int]] = {}
    in_keys, lengths = [], []
    for number in range(keys.num_rings):
        how = (keys.route(number), number in keys.limited, number in cut.kept, number in cut.sent_sums)
        groups.setdefault(how, []).append(number)
        _, start, stop = keys.member_keys(index, number, keys.place(number))
        in_keys.append((start, stop))
        lengths.append(stop - start)
    in_slice = CuSeqlens.of_lengths(lengths)
    intervals = list(pairwise(in_slice.offsets))
    windows: list[WindowPass] = []
    passes: list[RingPass] = []
    for numbers in groups.values():
        rows = Rows.of(intervals[number] for number in numbers)
        if not any(start < stop for start, stop in (cut.ring_range(number, index) for number in numbers)):
            continue
        if numbers[0] in keys.limited:
            windows.append(_slice_window(keys, index, numbers, rows))
        else:
            passes.append(_slice_pass(keys, index, numbers, rows))
    first, last = (regions[keys.num_rings] + token for token in cut.local_range(index))
    documents = pairwise(regions[keys.num_rings :])
    pieces = [(begin, max(begin, first), min(end, last)) for begin, end in documents]
    pieces = [piece for piece in pieces if piece[1] < piece[2]]
    layout = _with_local(num_rows, tuple(passes), in_slice.num_tokens, pieces, keys.window)
    layout = replace(layout, windows=tuple(windows))
    added = {number: keys.added_rows(index, number, number in cut.kept) for number in range(keys.num_rings)}
    sums = [keys.added_rows(index, number, number in cut.kept - cut.sent_sums) for number in added]
    on_device = [rows for number, rows in added.items() if number not in cut.swapped]
    in_host = [rows for number, rows in added.items() if number in cut.swapped]
    held = _with_part(before.held if before else None, [*on_device, [(first, last)]])
    swapped = _with_part(before.swapped if before else None, in_host) if cut.swapped else PartRows(())
    return SliceLayout(
        index,
        cut.num_slices,
        layout,
        Rows.of([*in_keys, (first, last)]),
        held,
        swapped,
        PartRows(held.places + swapped.places) if cut.swapped else held,
        _with_part(before.summed if before else None, [*sums, [(first, last)]]),
    )


def _with_part(before: PartRows | None, rows: Sequence[list[tuple[int, int]]]) -> PartRows:
    """Return the parts of the slices before, and one more with these rows."""
    return PartRows((*(before.places if before else ()), Rows.of(sorted(chain.from_iterable(rows)))))


def _slice_window(keys: _KeyRows, index: int, numbers: Sequence[int], in_slice: Rows) -> WindowPass:
    """Return the pass of slice ``index`` of the shards ``numbers``, which share a ring and have a window."""
    assert keys.window is not None, f"{numbers=}"
    shards, ends = keys.cut.micro_batch.shards, keys.cut.ring_ends
    sequences = [
        WindowSequence(shards[number].seq, ends[number][: index + 1], keys.regions[number]) for number in numbers
    ]
    return window_pass(sequences, keys.route(numbers[0]), in_slice, keys.window)


def _slice_pass(keys: _KeyRows, index: int, numbers: Sequence[int], in_slice: Rows) -> RingPass:
    """Return the pass of slice ``index`` of the shards ``numbers``, which share a ring; all are kept or none."""
    cut = keys.cut
    route, is_kept = keys.route(numbers[0]), numbers[0] in cut.kept
    ranges = [cut.ring_range(number, index) for number in numbers]
    of_members = {
        member: [keys.member_keys(index, number, member) for number in numbers]
        for member in (range(route.width) if is_kept else [route.index])
    }
    whole = {member: Rows.of((begin, stop) for begin, _, stop in of_member) for member, of_member in of_members.items()}
    own = {member: Rows.of((own, stop) for _, own, stop in of_member) for member, of_member in of_members.items()}
    return ring_pass(
        [stop - start for start, stop in ranges],
        route,
        [cut.micro_batch.shards[number].seq for number in numbers],
        in_slice,
        PrefixKeys(
            tuple(start for start, _ in ranges),
            whole[route.index],
            KeptKeys(tuple(whole.values()), tuple(own.values()), numbers[0] in cut.sent_sums) if is_kept else None,
        ),
    )


def _share(num_tokens: int, width: int, member: int) -> int:
    """Return the tokens of a ring member's zigzag share."""
    return sum(stop - start for start, stop in zigzag_ranges(num_tokens, width, member))


def sample_layouts(lengths: Sequence[int], batch: int, window: int | None = None) -> tuple[SliceLayout, ...]:
    """Return the layout of each slice of a micro-batch of ``batch`` samples side by side, all cut alike.

    The rows of a slice are its first sample, then the next one; keys are numbered sample after sample.

    Args:
        lengths: tokens of each slice of a sample.
        batch: number of samples.
        window: as in ``slice_layouts``.
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

    ``pieces``: for each document, three rows of the keys: where it begins, where its piece begins, where its piece
    ends.
    """
    local = CuSeqlens.of_lengths([stop - start for _, start, stop in pieces])
    keys = Rows.of((start, stop) for _, start, stop in pieces)
    rows = [(row + first, row + last) for first, last in pairwise(local.offsets)]
    began = [(mine, (begin, start)) for mine, (begin, start, _) in zip(rows, pieces, strict=True) if begin < start]
    if window is not None:
        seen = [(max(begin, start - window), stop) for begin, start, stop in pieces]
        in_window = PlacedBlock.in_window(rows, seen, window)
        return AttentionLayout(num_rows, passes, row, local, keys, None, in_window)
    prefix = PlacedBlock.of([mine for mine, _ in began], [before for _, before in began]) if began else None
    return AttentionLayout(num_rows, passes, row, local, keys, prefix)
