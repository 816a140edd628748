"""The tokens after each label: of ring shards, whole documents and pieces, against lists."""

from __future__ import annotations

import pytest

from bytescale_ext.data.loading.step import LoaderSettings
from bytescale_ext.data.samples.future import NO_TOKEN, future_tokens, no_future
from bytescale_ext.plan.step.micro_batch import MicroBatch, Shard, zigzag_ranges
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


def test_a_piece_knows_one_token_of_the_next() -> None:
    source = MemorySource([7], seq_length=4)  # pieces 1..4, 5..7
    found = future_tokens(MicroBatch((Shard(0, ((0, 4),), (0,)),)), source, [0], [4], 4, 2)
    assert found.tolist() == [[3, 4], [4, 5], [5, NO_TOKEN], [NO_TOKEN, NO_TOKEN]]


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
