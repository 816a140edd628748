"""Input of a rank's forward passes, as whole micro-batches or slices, and the tokens that they read."""

from __future__ import annotations

import pytest

from bytescale_ext.attention.layouts.layout import AttentionLayout
from bytescale_ext.attention.layouts.slices import SliceLayout
from bytescale_ext.data.samples.units import padding_units, units_of
from bytescale_ext.plan.schedule.document_slices import SliceRule
from bytescale_ext.plan.step.micro_batch import MicroBatch, Shard, zigzag_ranges
from bytescale_ext.plan.step.sizes import Slicing
from tests.data.sources import MemorySource

LENGTHS = (40, 7, 12)
RING = (0, 1)


def row(rank: int) -> list[MicroBatch]:
    """Return two micro-batches of a rank: a ring shard, with documents on rank 0; then an empty micro-batch."""
    documents = (Shard(1, ((0, 7),), (0,)), Shard(2, ((0, 12),), (0,))) if rank == 0 else ()
    return [MicroBatch((Shard(0, zigzag_ranges(40, 2, rank), RING), *documents)), MicroBatch(())]


def test_whole_micro_batches() -> None:
    first, hole = units_of(row(0), LENGTHS, 0, 4, None)
    assert isinstance(first.layout, AttentionLayout)
    assert first.num_rows == first.layout.num_rows == 40
    assert hole.num_rows == 0
    assert hole.read(MemorySource([]), [], LENGTHS).num_rows == 0
    packed = first.read(MemorySource(LENGTHS), [0, 1, 2], LENGTHS)
    assert packed.layout is first.layout
    assert packed.num_rows == 40


def test_slices_read_every_token_and_label_once() -> None:
    """Both ranks together have equal tokens. With slices a rank has other tokens of a ring's sequence, but as many."""
    rows: dict[int, list[tuple[int, ...]]] = {}
    for num_slices, rule in ((1, None), (3, SliceRule(Slicing(3)))):
        units = [units_of(row(rank), LENGTHS, rank, 1, rule) for rank in RING]
        assert [len(one) for one in units] == [2 * num_slices] * 2  # the slices of the hole are padding
        packed = [unit.read(MemorySource(LENGTHS), [0, 1, 2], LENGTHS) for one in units for unit in one]
        rows[num_slices] = sorted(
            values
            for one in packed
            for values in zip(*(getattr(one, name)[: one.micro_batch.num_tokens].tolist()
                                for name in ("tokens", "labels", "positions", "loss_mask")), strict=True)
        )  # fmt: skip
    assert rows[1] == rows[3]
    assert len(rows[1]) == sum(LENGTHS)
    assert [one.layout.index for one in packed] == [0, 1, 2] * 4
    assert all(one.num_rows == one.layout.num_rows >= 1 for one in packed)


@pytest.mark.parametrize("multiple", [16, 32, 64])
@pytest.mark.parametrize("num_slices", [1, 3])
def test_rows_are_padded_to_whole_blocks_and_tokens_stay_the_same(multiple: int, num_slices: int) -> None:
    """Every unit is padded for FP8, even without tokens. Padding has no label, and attention ignores it."""
    rule = SliceRule(Slicing(num_slices), rows_multiple=multiple) if num_slices > 1 else None
    for rank in RING:
        units = units_of(row(rank), LENGTHS, rank, multiple, rule)
        packed = [unit.read(MemorySource(LENGTHS), [0, 1, 2], LENGTHS) for unit in units]
        assert [one.num_rows % multiple for one in packed] == [0] * 2 * num_slices
        assert [one.num_rows for one in packed[num_slices:]] == [multiple * (num_slices > 1)] * num_slices
        assert sum(one.micro_batch.num_tokens for one in packed) == sum(one.num_tokens for one in row(rank))
        for one in packed:
            layout = one.layout.attention if isinstance(one.layout, SliceLayout) else one.layout
            num_tokens = one.micro_batch.num_tokens
            assert layout is not None
            assert (layout.num_tokens, layout.num_rows) == (num_tokens, one.num_rows)
            assert not one.loss_mask[num_tokens:].any()
    rows = [one.num_rows for one in padding_units(num_slices, multiple)]
    assert rows == [multiple] * num_slices


@pytest.mark.parametrize("rule", [None, SliceRule(Slicing(3))])
def test_each_sequence_is_counted_once(rule: SliceRule | None) -> None:
    """The first rank of a ring counts its sequence, in one unit of the micro-batch."""
    units = [units_of(row(rank), LENGTHS, rank, 1, rule) for rank in RING]
    packed = [[unit.read(MemorySource(LENGTHS), [0, 1, 2], LENGTHS) for unit in one] for one in units]
    counts = [[one.counted_lengths for one in mine if one.counted_lengths] for mine in packed]
    assert counts == [[LENGTHS], []]
    assert packed[0][0].counted_lengths == LENGTHS
