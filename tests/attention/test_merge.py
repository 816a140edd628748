"""Joining blocks of keys by their log-sum-exp."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bytescale_ext.attention.kernels.contract import empty_output
from bytescale_ext.attention.kernels.reference import reference_forward
from bytescale_ext.attention.merge import merge_
from tests.attention.cases import block_of

INFINITY = float("inf")


def values(rows: int, heads: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(rows, heads, 8, generator=torch.Generator().manual_seed(rows * 10 + heads), dtype=dtype)


def test_blocks_of_keys_join_to_the_whole() -> None:
    q, k, v = values(6, 4), values(11, 2), values(12, 2)[:11]
    out, lse = reference_forward(q, k, v, block_of([6], [11], causal=False))
    total_out, total_lse = reference_forward(q, k[:4], v[:4], block_of([6], [4], causal=False))
    for keys in (slice(4, 5), slice(5, 11)):
        block = block_of([6], [keys.stop - keys.start], causal=False)
        merge_(total_out, total_lse, *reference_forward(q, k[keys], v[keys], block))
    torch.testing.assert_close(total_out, out, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(total_lse, lse, rtol=1e-13, atol=1e-13)


@pytest.mark.slow
@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.integers(0, 9), st.permutations(range(6)))
@settings(max_examples=40, deadline=None)
def test_any_cut_of_the_keys_in_any_order(sizes: list[int], num_queries: int, order: list[int]) -> None:
    """Empty blocks of keys change nothing."""
    num_keys = sum(sizes)
    q, k, v = values(num_queries, 4), values(num_keys, 2), -values(num_keys, 2)
    out, lse = reference_forward(q, k, v, block_of([num_queries], [num_keys], causal=False))
    total_out, total_lse = empty_output(q)
    for number in (one for one in order if one < len(sizes)):
        keys = slice(sum(sizes[:number]), sum(sizes[: number + 1]))
        block = block_of([num_queries], [sizes[number]], causal=False)
        merge_(total_out, total_lse, *reference_forward(q, k[keys], v[keys], block))
    torch.testing.assert_close(total_out, out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(total_lse, lse, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    ("mine", "block", "weight", "merged"),
    [
        (-INFINITY, 1.5, 1.0, 1.5),
        (1.5, -INFINITY, 0.0, 1.5),
        (-INFINITY, -INFINITY, 0.0, -INFINITY),
        (3e4, -3e4, 0.0, 3e4),
        (-3e4, 3e4, 1.0, 3e4),
        (-80.0, -80.0, 0.5, -80.0 + 0.6931471805599453),
    ],
)
def test_extreme_sums(mine: float, block: float, weight: float, merged: float, dtype: torch.dtype) -> None:
    total_out, total_lse = torch.full((1, 1, 2), 2.0, dtype=dtype), torch.full((1, 1), mine, dtype=dtype)
    merge_(total_out, total_lse, torch.full((1, 1, 2), 6.0, dtype=dtype), torch.full((1, 1), block, dtype=dtype))
    torch.testing.assert_close(total_out, torch.full((1, 1, 2), 2.0 + 4.0 * weight, dtype=dtype))
    torch.testing.assert_close(total_lse, torch.full((1, 1), merged, dtype=dtype))
