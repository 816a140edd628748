"""Units of work: micro-batches or slices of one rank with their attention layouts, before their tokens are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from bytescale_ext.attention.layouts.layout import AttentionLayout, attention_layout
from bytescale_ext.attention.layouts.slices import SliceLayout, slice_layouts
from bytescale_ext.data.samples.packed import PackedMicroBatch, TokenSource, dummy_micro_batch, pack_micro_batch, padded
from bytescale_ext.plan.schedule.check_slices import check_document_slices
from bytescale_ext.plan.schedule.document_slices import SliceRule
from bytescale_ext.plan.step.micro_batch import MicroBatch
from bytescale_ext.plan.step.sizes import Slicing


@dataclass(frozen=True, eq=False, slots=True)
class Unit:
    """Input of one forward pass: a micro-batch, or one slice of it.

    Attributes:
        micro_batch: token ranges in memory order.
        num_rows: number of rows, including padding.
        layout: attention layout.
        counted_lengths: lengths of the sequences that this rank counts. The first rank of a ring counts a sequence, in
            the first slice of the micro-batch, so that each sequence of a step is counted once.
        window_layout: attention layout of layers with a sliding window, or None.
    """

    micro_batch: MicroBatch
    num_rows: int
    layout: AttentionLayout | SliceLayout
    counted_lengths: tuple[int, ...] = ()
    window_layout: AttentionLayout | SliceLayout | None = None

    def read(
        self,
        source: TokenSource,
        sample_ids: Sequence[int],
        lengths: Sequence[int],
        vocab_size: int | None = None,
    ) -> PackedMicroBatch:
        """Read the tokens; see ``pack_micro_batch``."""
        if not self.micro_batch.shards:
            packed = dummy_micro_batch(self.num_rows)
        else:
            packed = pack_micro_batch(self.micro_batch, source, sample_ids, self.num_rows, lengths, vocab_size)
        return self._with_layouts(replace(packed, counted_lengths=self.counted_lengths))

    def padding(self) -> PackedMicroBatch:
        """Return padding with the same layouts."""
        return self._with_layouts(dummy_micro_batch(self.num_rows))

    def _with_layouts(self, packed: PackedMicroBatch) -> PackedMicroBatch:
        return replace(packed, layout=self.layout, window_layout=self.window_layout)


def units_of(
    micro_batches: Sequence[MicroBatch],
    lengths: Sequence[int],
    rank: int,
    rows_multiple: int,
    rule: SliceRule | None,
    window: int | None = None,
) -> tuple[Unit, ...]:
    """Return the units of a rank's step in the order of their forward passes. No communication.

    Args:
        micro_batches: micro-batches of ``rank``. An empty micro-batch has no rows, and its slices are padding.
        lengths: tokens of each sequence of the step.
        rank: HDP rank.
        rows_multiple: number to whose multiple the rows of a unit are padded.
        rule: rule that splits micro-batches into slices; None leaves them whole.
        window: number of earlier tokens that a token attends to in layers with a sliding window; None without them.
    """
    units: list[Unit] = []
    for micro_batch in micro_batches:
        counted = tuple(lengths[shard.seq] for shard in micro_batch.shards if shard.ring[0] == rank)
        if rule is None:
            num_rows = padded(micro_batch.num_tokens, rows_multiple)
            layout = attention_layout(micro_batch, rank, lengths, num_rows)
            windowed = None if window is None else attention_layout(micro_batch, rank, lengths, num_rows, window)
            units.append(Unit(micro_batch, num_rows, layout, counted, windowed))
        else:
            first, *others = _slices(micro_batch, lengths, rank, rows_multiple, rule, window)
            units += [replace(first, counted_lengths=counted), *others]
    return tuple(units)


def _slices(
    micro_batch: MicroBatch,
    lengths: Sequence[int],
    rank: int,
    rows_multiple: int,
    rule: SliceRule,
    window: int | None,
) -> list[Unit]:
    """Split a micro-batch into slices of at least one row each, because messages between stages must not be empty."""
    sliced = rule(micro_batch, lengths)
    check_document_slices({rank: [sliced]}, lengths, rule.slicing, rule.rows_multiple)
    parts = [sliced.slice(index, rank) for index in range(rule.slicing.num_slices)]
    rows = [padded(max(part.num_tokens, 1), rows_multiple) for part in parts]
    units = [Unit(*unit) for unit in zip(parts, rows, slice_layouts(sliced, rank, rows), strict=True)]
    if window is None:
        return units
    windowed = slice_layouts(sliced, rank, rows, window)
    return [replace(unit, window_layout=layout) for unit, layout in zip(units, windowed, strict=True)]


def padding_units(num_slices: int, rows: int, window: int | None = None) -> tuple[PackedMicroBatch, ...]:
    """Return a micro-batch of padding, whole or in slices, of ``rows`` rows each; ``window``: see ``units_of``."""
    if num_slices > 1:
        rule = SliceRule(Slicing(num_slices))
        return tuple(unit.padding() for unit in units_of([MicroBatch(())], (), 0, rows, rule, window))
    empty = MicroBatch(())
    windowed = None if window is None else attention_layout(empty, 0, (), rows, window)
    return (Unit(empty, rows, attention_layout(empty, 0, (), rows), (), windowed).padding(),)
