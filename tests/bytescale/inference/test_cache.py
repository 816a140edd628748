"""A cache keeps the accepted rows of a tree, in their order, and forgets the others."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.bytescale.inference.cache import CachedAttention, DecodeParams, KeyValueCache


def rows(*values: int) -> torch.Tensor:
    """Keys [t, 1, 1] with these values."""
    return torch.tensor(values, dtype=torch.float64).view(-1, 1, 1)


def test_accepted_rows_take_the_place_of_a_tree() -> None:
    cache, layers = KeyValueCache(8), (object(), object())
    for layer in layers:
        keys, values = cache.append(layer, rows(1, 2), rows(-1, -2))
        assert keys.flatten().tolist() == [1, 2]
    cache.keep(range(2))
    for layer in layers:
        keys, values = cache.append(layer, rows(10, 11, 12, 13), rows(20, 21, 22, 23))
        assert keys.flatten().tolist() == [1, 2, 10, 11, 12, 13]
        assert values.flatten().tolist() == [-1, -2, 20, 21, 22, 23]
    cache.keep([0, 2, 3])
    assert cache.length == 5
    for layer in layers:
        keys, values = cache.append(layer, rows(5), rows(6))
        assert keys.flatten().tolist() == [1, 2, 10, 12, 13, 5]
        assert values.flatten().tolist() == [-1, -2, 20, 22, 23, 6]


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 2**6 - 1)), max_size=8))
def test_any_passes_leave_what_was_kept(passes: list[tuple[int, int]]) -> None:
    """Against a list: each pass writes some rows and keeps those whose bit is set."""
    cache, layer, kept, number = KeyValueCache(60), object(), list[int](), 0
    for num_rows, bits in passes:
        new = list(range(number, number + num_rows))
        number += num_rows
        keys, values = cache.append(layer, rows(*new), rows(*(-one for one in new)))
        assert keys.flatten().tolist() == [*kept, *new]
        assert values.flatten().tolist() == [-one for one in (*kept, *new)]
        chosen = [row for row in range(num_rows) if bits >> row & 1]
        cache.keep(chosen)
        kept += [new[row] for row in chosen]
        assert cache.length == len(kept)


def test_more_than_fits_is_a_defect() -> None:
    with pytest.raises(AssertionError, match="capacity=2"):
        KeyValueCache(2).append(object(), rows(1, 2, 3), rows(1, 2, 3))


def test_attention_needs_a_cache() -> None:
    attention = CachedAttention.__new__(CachedAttention)
    torch.nn.Module.__init__(attention)
    q = torch.zeros(1, 1, 1, 1)
    with pytest.raises(AssertionError, match="cache=None"):
        attention.forward(q, q, q, packed_seq_params=DecodeParams())
