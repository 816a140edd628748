"""Blocks: refused inputs, computed documents, and their rows."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bytescale_ext.attention.layouts.blocks import AttentionBlock, PlacedBlock
from bytescale_ext.attention.layouts.rows import CuSeqlens
from tests.attention.cases import block_of


@pytest.mark.parametrize("causal", [True, False])
def test_queries_and_keys_are_of_the_same_documents(causal: bool) -> None:
    with pytest.raises(ValueError, match="as many documents of keys as of queries, got 1 and 2"):
        AttentionBlock(CuSeqlens((0, 3)), CuSeqlens((0, 1, 3)), causal, 1.0)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=6))
def test_documents_without_queries_or_keys_are_skipped(lengths: list[tuple[int, int]]) -> None:
    block = block_of([q for q, _ in lengths], [k for _, k in lengths], causal=False)
    assert block.num_documents == len(lengths)
    ends = list(zip(accumulate(q for q, _ in lengths), accumulate(k for _, k in lengths), strict=True))
    expected = [
        (slice(q_end - q, q_end), slice(k_end - k, k_end))
        for (q, k), (q_end, k_end) in zip(lengths, ends, strict=True)
        if q and k
    ]
    assert list(block.documents()) == expected


def test_a_placed_block_leaves_out_documents_with_nothing_to_compute() -> None:
    queries, keys = [(0, 2), (2, 2), (2, 5), (7, 9)], [(0, 4), (4, 6), (6, 6), (8, 9)]
    block = PlacedBlock.of(queries, keys, source=3)
    assert block.queries.intervals == ((0, 2), (7, 9))
    assert block.keys.intervals == ((0, 4), (8, 9))
    assert (block.cu_q.offsets, block.cu_k.offsets) == ((0, 2, 4), (0, 4, 5))
    assert (block.causal, block.source, block.is_empty) == (False, 3, False)
    assert PlacedBlock.of(queries[1:3], keys[1:3]).is_empty
    assert PlacedBlock.of([], []).is_empty


def test_a_window_needs_a_causal_block_with_no_fewer_keys_than_queries() -> None:
    for lengths_k, causal, window in (([5], False, 2), ([2], True, 2), ([5], True, 0)):
        with pytest.raises(ValueError, match="a window needs a causal block with at least as many keys as queries"):
            block_of([3], lengths_k, causal, window=window)
    assert block_of([3], [5], window=2).num_documents == 1


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 6)), max_size=4), st.integers(1, 8), st.integers(1, 5))
def test_tiles_hold_each_query_once_with_the_keys_that_it_sees(
    lengths: list[tuple[int, int]], window: int, num_queries: int
) -> None:
    block = block_of([q for q, _ in lengths], [q + before for q, before in lengths], window=window)
    expected, found = set(), []
    for rows, keys in block.documents():
        own = keys.stop - rows.stop  # from a query to its own key
        expected |= {
            (row, key)
            for row in range(rows.start, rows.stop)
            for key in range(max(keys.start, row + own - window), row + own + 1)
        }
    for tile in block.tiles(num_queries):
        assert 0 < tile.rows.stop - tile.rows.start <= num_queries
        assert tile.keys.stop - tile.keys.start <= window + num_queries
        seen = (~tile.hidden(torch.device("cpu"))).nonzero().tolist()
        found += [(tile.rows.start + row, tile.keys.start + key) for row, key in seen]
    assert len(found) == len(expected)
    assert set(found) == expected


def test_a_window_that_limits_nothing_is_left_out() -> None:
    """Documents within the window are plain causal documents, unless they have keys before their first query."""
    assert PlacedBlock.in_window([(0, 4), (4, 7)], [(0, 4), (4, 7)], 3).window is None
    assert PlacedBlock.in_window([(0, 4), (4, 9)], [(0, 4), (4, 9)], 3).window == 3
    block = PlacedBlock.in_window([(0, 2)], [(3, 6)], 5)
    assert (block.window, block.causal) == (5, True)
    assert block.attention(0.5).window == 5
