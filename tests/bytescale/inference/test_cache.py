"""A cache keeps the accepted rows of a tree in order, and drops the others."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from bytescale_ext.attention.kernels.table import choose_kernel
from megatron.bytescale.inference.cache import CachedAttention, DecodeParams, KeyValueCache, NewTokens
from tests.bytescale.runtimes import runtime_of


def rows(*values: int) -> torch.Tensor:
    """Return keys [t, 1, 1] with these values."""
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
    """The cache equals a list. Each pass writes some rows and keeps the rows with a set bit."""
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


def test_texts_side_by_side_attend_to_their_own_caches() -> None:
    """Two texts of different lengths, the second with a tree, equal separate runs."""
    attention = CachedAttention.__new__(CachedAttention)
    torch.nn.Module.__init__(attention)
    attention.runtime, attention.scale = runtime_of(kernel=choose_kernel("cpu", torch.float64, 4)[0]), 0.5
    attention.window = attention.softmax_offset = None
    torch.manual_seed(0)
    visible = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]]).bool()
    counts, seen, together, alone = (2, 3), (None, visible), [KeyValueCache(9) for _ in "ab"], []
    for number in range(2):
        q, k, v = (torch.randn(5, 1, 2, 4, dtype=torch.float64) for _ in range(3))
        parts = [NewTokens(*one) for one in zip(together, counts, seen, strict=True)]
        found = attention.forward(q, k, v, packed_seq_params=DecodeParams(parts=parts))
        if not number:
            alone = [KeyValueCache(9) for _ in "ab"]
        for start, part, cache in zip((0, 2), parts, alone, strict=True):
            rows = slice(start, start + part.count)
            params = DecodeParams(parts=[NewTokens(cache, part.count, part.visible)])
            wanted = attention.forward(q[rows], k[rows], v[rows], packed_seq_params=params)
            torch.testing.assert_close(found[rows], wanted, rtol=1e-12, atol=1e-12)
            for one in (part.cache, cache):
                one.keep([0] if part.visible is None else [0, 2])
    assert [cache.length for cache in together] == [2, 4]
