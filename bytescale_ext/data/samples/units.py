"""The input of one forward pass of one rank, before its tokens are read: a micro-batch or a slice, with its layout."""

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
    """A micro-batch, or one slice of it.

    Attributes:
        micro_batch: the token ranges, in memory order.
        num_rows: rows, padding included.
        layout: its attention.
        counted_lengths: tokens of the sequences that this rank counts, as the first rank of their ring. The first slice
            of a micro-batch counts them all, so that each sequence of a step is counted once.
    """

    micro_batch: MicroBatch
    num_rows: int
    layout: AttentionLayout | SliceLayout
    counted_lengths: tuple[int, ...] = ()

    def read(
        self,
        source: TokenSource,
        sample_ids: Sequence[int],
        lengths: Sequence[int],
        vocab_size: int | None = None,
    ) -> PackedMicroBatch:
        """Read its tokens, as ``pack_micro_batch`` does."""
        if not self.micro_batch.shards:
            packed = dummy_micro_batch(self.num_rows)
        else:
            packed = pack_micro_batch(self.micro_batch, source, sample_ids, self.num_rows, lengths, vocab_size)
        return replace(packed, layout=self.layout, counted_lengths=self.counted_lengths)


def units_of(
    micro_batches: Sequence[MicroBatch], lengths: Sequence[int], rank: int, rows_multiple: int, rule: SliceRule | None
) -> tuple[Unit, ...]:
    """Return the units of a rank's step, in the order of their forward passes. Pure; no communication.

    Args:
        micro_batches: of ``rank``; an empty one has no rows, its slices are padding.
        lengths: tokens of each sequence of the step.
        rows_multiple: rows of each unit are padded to a multiple of this.
        rule: how micro-batches are cut into slices; None: they stay whole.
    """
    units: list[Unit] = []
    for micro_batch in micro_batches:
        counted = tuple(lengths[shard.seq] for shard in micro_batch.shards if shard.ring[0] == rank)
        if rule is None:
            num_rows = padded(micro_batch.num_tokens, rows_multiple)
            layout = attention_layout(micro_batch, rank, lengths, num_rows)
            units.append(Unit(micro_batch, num_rows, layout, counted))
        else:
            first, *others = _slices(micro_batch, lengths, rank, rows_multiple, rule)
            units += [replace(first, counted_lengths=counted), *others]
    return tuple(units)


def _slices(
    micro_batch: MicroBatch, lengths: Sequence[int], rank: int, rows_multiple: int, rule: SliceRule
) -> list[Unit]:
    """Cut a micro-batch into slices of at least one row each, because messages between stages cannot be empty."""
    cut = rule(micro_batch, lengths)
    check_document_slices({rank: [cut]}, lengths, rule.slicing, rule.rows_multiple)
    parts = [cut.slice(index, rank) for index in range(rule.slicing.num_slices)]
    rows = [padded(max(part.num_tokens, 1), rows_multiple) for part in parts]
    return [Unit(*unit) for unit in zip(parts, rows, slice_layouts(cut, rank, rows), strict=True)]


def padding_units(num_slices: int, rows: int) -> tuple[PackedMicroBatch, ...]:
    """Return a micro-batch of padding alone, whole or in slices, of ``rows`` rows each."""
    rule = None if num_slices == 1 else SliceRule(Slicing(num_slices))
    empty = dummy_micro_batch(rows)
    if rule is None:
        return (replace(empty, layout=attention_layout(empty.micro_batch, 0, (), rows)),)
    return tuple(replace(empty, layout=unit.layout) for unit in units_of([empty.micro_batch], (), 0, rows, rule))
