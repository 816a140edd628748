"""Joined and separate matrix products of groups of heads, and of the experts of a layer."""

from __future__ import annotations

import pytest
import torch

from bytescale_ext.convert.products import join_qkv, split_qkv, stack, unstack


@pytest.mark.parametrize("columns", [(), (5,)])
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (6, 2), (3, 1)])
def test_a_product_is_split_and_joined(heads: int, groups: int, columns: tuple[int, ...]) -> None:
    dim = 3
    queries, keys, values = (torch.randn(count * dim, *columns) for count in (heads, groups, groups))
    joined = join_qkv([queries, keys, values], groups, dim)
    share = heads // groups
    first = [queries[: share * dim], keys[:dim], values[:dim]]
    assert torch.equal(joined[: (share + 2) * dim], torch.cat(first))
    for part, expected in zip(split_qkv(joined, groups, dim), (queries, keys, values), strict=True):
        assert torch.equal(part, expected)


@pytest.mark.parametrize("alternates", [True, False])
@pytest.mark.parametrize("inputs", [(), (5,)])
def test_experts_are_stacked_and_apart(alternates: bool, inputs: tuple[int, ...]) -> None:
    stacked = torch.randn(3, *inputs, 8)
    apart = unstack(stacked, alternates)
    assert [one.shape for one in apart] == [(8, *inputs)] * 3
    assert all(one.is_contiguous() for one in apart)
    order = [0, 2, 4, 6, 1, 3, 5, 7] if alternates else list(range(8))
    for row, output in enumerate(order):
        assert torch.equal(apart[1][row], stacked[1, ..., output])
    assert torch.equal(stack(apart, alternates), stacked)
