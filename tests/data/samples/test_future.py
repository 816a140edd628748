"""The tokens after each label: of ring shards, whole documents and pieces, against lists."""

from __future__ import annotations

import pytest
import torch

from bytescale_ext.data.loading.step import LoaderSettings
from bytescale_ext.data.samples.future import NO_TOKEN, future_tokens, future_weights, no_future
from bytescale_ext.plan.step.micro_batch import MicroBatch, Shard, zigzag_ranges
from tests.data.samples.test_answers import MarkedSource
from tests.data.sources import MemorySource


def expected(lengths: list[int], shard: Shard, count: int) -> list[list[int]]:
    """By the definition: token p of document d is ``1 + sum(lengths[:d]) + p``."""
    before, length = 1 + sum(lengths[: shard.seq]), lengths[shard.seq]
    return [
        [before + p + 2 + ahead if p + 2 + ahead < length else NO_TOKEN for ahead in range(count)]
        for start, stop in shard.ranges
        for p in range(start, stop)
    ]


@pytest.mark.parametrize("count", [1, 3, 9])
def test_future_of_shards_and_documents(count: int) -> None:
    lengths = [16, 3, 1]
    source = MemorySource(lengths)
    shards = [Shard(0, zigzag_ranges(16, 2, 1), (0, 1)), Shard(1, ((0, 3),), (0,)), Shard(2, ((0, 1),), (0,))]
    found = future_tokens(MicroBatch(tuple(shards)), source, [0, 1, 2], lengths, 14, count)
    wanted = [row for shard in shards for row in expected(lengths, shard, count)]
    assert found.tolist() == [*wanted, *[[NO_TOKEN] * count] * 2]
    assert all(stop <= lengths[sample] + 1 for sample, _, stop in source.reads)


def test_the_loader_reads_them_where_heads_want_them() -> None:
    from bytescale_ext.data.samples.units import units_of

    source, micro_batch = MemorySource([5]), MicroBatch((Shard(0, ((0, 5),), (0,)),))
    units = units_of([micro_batch, MicroBatch(())], [5], 0, 2, None)
    for count in (0, 2):
        first, empty = LoaderSettings(0, 1, rows_multiple=2, future_tokens=count).read(units, source, [0], [5])
        if not count:
            assert first.future is empty.future is None
            continue
        assert first.future is not None
        assert empty.future is not None
        assert first.to("cpu").future is not None
        assert first.future.tolist() == [[3, 4], [4, 5], [5, -1], [-1, -1], [-1, -1], [-1, -1]]
        assert empty.future.shape == (0, 2)
    assert no_future(2, 1).tolist() == [[NO_TOKEN], [NO_TOKEN]]


def expected_weights(has_loss: list[bool], count: int) -> list[list[float]]:
    """By the definition, as Megatron's for a micro-batch of one document: masks roll one place to the left by depth."""
    masks = [[*has_loss[ahead:], *[False] * min(ahead, len(has_loss))] for ahead in range(1, count + 1)]
    return [
        [mask[row] * sum(has_loss) / sum(mask) if mask[row] else 0.0 for mask in masks] for row in range(len(has_loss))
    ]


@pytest.mark.parametrize("count", [1, 3, 20])
@pytest.mark.parametrize("kind", [MemorySource, MarkedSource])
def test_weights_of_a_ring_are_those_of_the_document_alone(kind: type[MemorySource], count: int) -> None:
    lengths = (16, 3, 1)
    source = kind(lengths)
    for seq, length in enumerate(lengths):
        labels = [p + 1 < length and (kind is MemorySource or (p + 1) % 3 == 0) for p in range(length)]
        wanted = torch.tensor(expected_weights(labels, count))
        alone = MicroBatch((Shard(seq, ((0, length),), (0,)),))
        found = future_weights(alone, source, [0, 1, 2], lengths, length + 2, count)
        torch.testing.assert_close(found[:length], wanted)
        assert not found[length:].any(), "padding has a weight"
        if seq:
            continue
        for width in (2, 4):
            for member in range(width):
                ranges = zigzag_ranges(length, width, member)
                shard = MicroBatch((Shard(seq, ranges, tuple(range(width))),))
                rows = [p for start, stop in ranges for p in range(start, stop)]
                found = future_weights(shard, source, [0, 1, 2], lengths, len(rows), count)
                torch.testing.assert_close(found, wanted[rows])


def test_weights_come_with_the_tokens_where_they_are_wanted() -> None:
    from bytescale_ext.data.samples.units import units_of

    source, micro_batch = MemorySource([5]), MicroBatch((Shard(0, ((0, 5),), (0,)),))
    units = units_of([micro_batch], [5], 0, 1, None)
    settings = LoaderSettings(0, 1, future_tokens=2, weighs_future=True)
    (found,) = settings.read(units, source, [0], [5])
    assert found.future is not None
    assert found.future_weights is not None
    assert found.to("cpu").future_weights is not None
    assert ((found.future_weights > 0) == (found.future != NO_TOKEN)).all()
    (heads,) = LoaderSettings(0, 1, future_tokens=2).read(units, source, [0], [5])
    assert heads.future_weights is None
