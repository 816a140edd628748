"""What one forward pass of one rank consumes, ready to be read: a micro-batch, or a slice of it, with its layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from bytescale_ext.attention.layout import AttentionLayout, attention_layout
from bytescale_ext.attention.slice_layout import SliceLayout, slice_layouts
from bytescale_ext.data.packed import PackedMicroBatch, TokenSource, dummy_micro_batch, pack_micro_batch, padded
from bytescale_ext.plan.document_slices import SliceRule
from bytescale_ext.plan.shapes import MicroBatch


@dataclass(frozen=True, eq=False, slots=True)
class Unit:
    """A micro-batch, or one slice of it.

    Attributes:
        micro_batch: the token ranges, in memory order.
        num_rows: with padding.
        layout: its attention.
    """

    micro_batch: MicroBatch
    num_rows: int
    layout: AttentionLayout | SliceLayout

    def read(
        self,
        source: TokenSource,
        sample_ids: Sequence[int],
        lengths: Sequence[int],
        vocab_size: int | None = None,
    ) -> PackedMicroBatch:
        """Its tokens, as ``pack_micro_batch``."""
        if not self.micro_batch.shards:
            return replace(dummy_micro_batch(self.num_rows), layout=self.layout)
        packed = pack_micro_batch(self.micro_batch, source, sample_ids, self.num_rows, lengths, vocab_size)
        return replace(packed, layout=self.layout)


def units_of(
    micro_batches: Sequence[MicroBatch], lengths: Sequence[int], rank: int, rows_multiple: int, rule: SliceRule | None
) -> tuple[Unit, ...]:
    """The units of a rank's step, in the order of their forward passes. Pure; no communication.

    Args:
        micro_batches: of ``rank``; an empty one has no rows, its slices are padding.
        lengths: tokens of each sequence of the step.
        rows_multiple: rows of each unit are padded to a multiple of this.
        rule: how micro-batches are cut into slices; None: not at all.
    """
    units: list[Unit] = []
    for micro_batch in micro_batches:
        if rule is None:
            num_rows = padded(micro_batch.num_tokens, rows_multiple)
            layout = attention_layout(micro_batch, rank, lengths, num_rows)
            units.append(Unit(micro_batch, num_rows, layout))
        else:
            units.extend(_slices(micro_batch, lengths, rank, rows_multiple, rule))
    return tuple(units)


def _slices(
    micro_batch: MicroBatch, lengths: Sequence[int], rank: int, rows_multiple: int, rule: SliceRule
) -> list[Unit]:
    """The slices of a micro-batch; each has a row at least, as messages between stages need it."""
    cut = rule(micro_batch, lengths)
    parts = [cut.slice(index, rank) for index in range(rule.num_slices)]
    rows = [padded(max(part.num_tokens, 1), rows_multiple) for part in parts]
    return [Unit(*unit) for unit in zip(parts, rows, slice_layouts(cut, rank, rows), strict=True)]


def padding_units(num_slices: int, rows: int) -> tuple[PackedMicroBatch, ...]:
    """A micro-batch of padding alone, whole or in slices, of ``rows`` rows each."""
    rule = None if num_slices == 1 else SliceRule(num_slices)
    empty = dummy_micro_batch(rows)
    if rule is None:
        return (replace(empty, layout=attention_layout(empty.micro_batch, 0, (), rows)),)
    return tuple(replace(empty, layout=unit.layout) for unit in units_of([empty.micro_batch], (), 0, rows, rule))
