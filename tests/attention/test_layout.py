"""Rows and blocks: every causal pair of tokens is computed exactly once, by the rank that holds the query."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bytescale_ext.attention.layout import AttentionLayout, CuSeqlens, RingShard, attention_layout, ring_shard
from bytescale_ext.errors import PlanError
from bytescale_ext.plan.shapes import MicroBatch, Shard, zigzag_ranges
from tests.attention.cases import MIXED, TINY, Case


def tokens(length: int, width: int, index: int) -> list[int]:
    """The tokens of a ring member, in memory order."""
    return [token for start, stop in zigzag_ranges(length, width, index) for token in range(start, stop)]


def computed_pairs(shard: RingShard, length: int) -> Counter[tuple[int, int]]:
    """``(query token, key token)`` of every score that one member computes."""
    queries = tokens(length, shard.width, shard.index)
    pairs: Counter[tuple[int, int]] = Counter()
    for block in shard.blocks:
        keys = tokens(length, shard.width, block.source)[: block.num_keys]
        for row in range(block.query_start, block.query_stop):
            seen = row - block.query_start + 1 if block.causal else len(keys)
            pairs.update((queries[row], key) for key in keys[:seen])
    return pairs


@given(st.integers(1, 48), st.integers(1, 7))
def test_blocks_of_a_ring_are_the_causal_triangle_once(length: int, width: int) -> None:
    total: Counter[tuple[int, int]] = Counter()
    for index in range(width):
        total += computed_pairs(ring_shard(0, length, range(width), index), length)
    assert total == Counter((query, key) for query in range(length) for key in range(query + 1))


@given(st.integers(1, 6), st.integers(1, 8))
def test_members_compute_equal_shares_when_the_length_divides(width: int, part: int) -> None:
    length = 2 * width * part
    shares = [computed_pairs(ring_shard(0, length, range(width), index), length).total() for index in range(width)]
    assert len(set(shares)) == 1


@given(st.integers(2, 7), st.integers(1, 60))
def test_members_agree_on_what_travels(width: int, length: int) -> None:
    ring = tuple(range(10, 10 + width))
    shards = [ring_shard(0, length, ring, index) for index in range(width)]
    for index, shard in enumerate(shards):
        following = shards[(index + 1) % width]
        assert shard.next_rank == ring[following.index] and following.previous_rank == ring[index]
        sent = [block.source for block in shard.blocks[:-1]]
        assert sent == [block.source for block in following.blocks[1:]]
        assert shard.rows == following.rows and sum(shard.rows) == length
        assert [front + (rows - front) for front, rows in zip(shard.fronts, shard.rows, strict=True)] == list(
            shard.rows
        )


@pytest.mark.parametrize("case", [MIXED, TINY])
def test_rows_follow_each_other_in_memory_order(case: Case) -> None:
    for number in range(len(case.rounds)):
        for rank in range(case.num_ranks):
            layout = case.layout(number, rank)
            start = 0
            for shard in layout.rings:
                assert shard.start == start and shard.ring[shard.index] == rank
                start += shard.num_rows
            assert layout.local_start == start
            assert layout.num_tokens == case.micro_batch(number, rank).num_tokens == layout.num_rows - case.num_padding


def test_example_of_three_ranks() -> None:
    shard = ring_shard(seq=4, length=11, ring=(5, 6, 7), index=1, start=2)
    assert shard.rows == (4, 4, 3) and shard.fronts == (2, 2, 2)
    described = [(b.source, b.query_start, b.query_stop, b.num_keys, b.causal) for b in shard.blocks]
    assert described == [(1, 0, 4, 4, True), (0, 0, 4, 2, False), (2, 2, 4, 3, False)]
    assert (shard.next_rank, shard.previous_rank) == (7, 5)
    assert [b.cu_q.offsets for b in shard.blocks] == [(0, 4), (0, 4), (0, 2)]


def test_an_empty_back_part_computes_nothing_for_later_members() -> None:
    shard = ring_shard(seq=0, length=2, ring=(0, 1), index=0)
    assert shard.rows == (1, 1)
    assert [block.is_empty for block in shard.blocks] == [False, True]


def local(seq: int, length: int, rank: int = 0) -> Shard:
    return Shard(seq, ((0, length),), (rank,))


def shared(seq: int, length: int, ring: tuple[int, ...], rank: int) -> Shard:
    return Shard(seq, zigzag_ranges(length, len(ring), ring.index(rank)), ring)


def layout_of(*shards: Shard, num_rows: int = 64) -> AttentionLayout:
    return attention_layout(MicroBatch(shards), 0, (9, 10, 11), num_rows)


def test_an_empty_micro_batch_is_all_padding() -> None:
    layout = layout_of(num_rows=8)
    assert (layout.num_tokens, layout.num_rows, layout.rings, layout.local.num_documents) == (0, 8, (), 0)


def test_layouts_are_values() -> None:
    first, second = MIXED.layout(0, 1), MIXED.layout(0, 1)
    first.rings[0].blocks[0].cu_q.on(torch.device("cpu"))
    assert first == second and hash(first) == hash(second)


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        ((local(0, 9), shared(1, 10, (0, 1), 0)), "before local"),
        ((shared(2, 11, (0, 1), 0), shared(1, 10, (0, 1), 0)), "ascending"),
        ((shared(1, 10, (1, 2), 1),), "in the ring once"),
        ((Shard(1, ((0, 5),), (0, 1)),), r"must hold \(\(0, 3\), \(8, 10\)\)"),
        ((shared(1, 10, (0, 1), 1),), "must hold"),
        ((local(0, 9, rank=3),), "one token range on rank 0"),
        ((Shard(0, ((0, 2), (4, 9)), (0,)),), "one token range"),
    ],
)
def test_a_broken_micro_batch_is_refused(shards: tuple[Shard, ...], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        layout_of(*shards)


def test_too_few_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="9 tokens does not fit in 8 rows"):
        layout_of(local(0, 9), num_rows=8)


@given(st.lists(st.integers(0, 9), max_size=6))
@settings(max_examples=30)
def test_offsets_of_lengths(lengths: list[int]) -> None:
    documents = CuSeqlens.of_lengths(lengths)
    assert documents.lengths == tuple(lengths)
    assert (documents.num_documents, documents.num_tokens) == (len(lengths), sum(lengths))
    assert documents.longest == max(lengths, default=0)
    tensor = documents.on(torch.device("cpu"))
    assert tensor.dtype == torch.int32 and tuple(tensor.tolist()) == documents.offsets
    assert documents.on(torch.device("cpu")) is tensor


@pytest.mark.parametrize("offsets", [(), (1, 2), (0, 3, 2)])
def test_offsets_must_ascend_from_zero(offsets: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="start at 0"):
        CuSeqlens(offsets)
