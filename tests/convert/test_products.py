"""Queries, keys and values of groups of heads, together and apart."""

from __future__ import annotations

import pytest
import torch

from bytescale_ext.convert.products import join_qkv, split_qkv


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
