"""Attention over a cache and a tree against dense attention with a mask, in float64."""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest
import torch

from bytescale_ext.attention.kernels.contract import Output
from bytescale_ext.attention.kernels.table import choose_kernel
from bytescale_ext.attention.layouts.blocks import AttentionBlock
from bytescale_ext.attention.layouts.rows import CuSeqlens
from bytescale_ext.decode.attention import (
    CachedLayer,
    cache_attention,
    cached_attention,
    num_cache_pieces,
    tree_attention,
)
from bytescale_ext.decode.tree import TokenTree

HEADS, KV_HEADS, DIM, SCALE = 4, 2, 8, 0.3
chosen_kernel = cache(choose_kernel)


def dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, sink: torch.Tensor | None = None
) -> torch.Tensor:
    """Return attention [t, heads, dim], computed for one query and head at a time; ``visible``: [t, keys]."""
    out = torch.zeros_like(q)
    for row in range(q.shape[0]):
        for head in range(HEADS):
            keys = visible[row].nonzero().flatten()
            group = head // (HEADS // KV_HEADS)
            scores = k[keys, group] @ q[row, head] * SCALE
            more = [] if sink is None else [sink[head : head + 1]]
            weights = torch.cat((scores, *more)).softmax(0)[: len(keys)]
            out[row, head] = weights @ v[keys, group]
    return out


def inputs(num_new: int, length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_new + 100 * length)
    sizes = ((num_new, HEADS, DIM), *[(length + num_new, KV_HEADS, DIM)] * 2)
    q, k, v = (torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes)
    return q, k, v


TREES = [TokenTree((0,), (-1,)), TokenTree((0, 1, 2, 3, 4, 5), (-1, 0, 0, 1, 1, 4)), TokenTree((0,) * 4, (-1, 0, 1, 2))]


@pytest.mark.parametrize("length", [0, 1, 37])
@pytest.mark.parametrize("tree", TREES, ids=lambda tree: str(len(tree.tokens)))
@pytest.mark.parametrize("name", [None, "reference"])
def test_a_tree_over_a_cache(tree: TokenTree, length: int, name: str | None) -> None:
    kernel = chosen_kernel("cpu", torch.float64, DIM, name)[0]
    num_new = len(tree.tokens)
    q, k, v = inputs(num_new, length)
    seen = torch.cat((torch.ones(num_new, length, dtype=torch.bool), tree.visible()), dim=1)
    found = cached_attention(q, k, v, tree.visible(), CachedLayer(kernel, SCALE))
    torch.testing.assert_close(found, dense(q, k, v, seen), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("length", [0, 5])
def test_a_slice_of_a_prompt_over_a_cache(length: int) -> None:
    kernel = chosen_kernel("cpu", torch.float64, DIM)[0]
    q, k, v = inputs(7, length)
    seen = torch.ones(7, length + 7, dtype=torch.bool).tril(length)
    found = cached_attention(q, k, v, None, CachedLayer(kernel, SCALE))
    torch.testing.assert_close(found, dense(q, k, v, seen), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("window", [None, 1, 2, 4, 36, 100])
@pytest.mark.parametrize("length", [0, 1, 37])
@pytest.mark.parametrize("tree", [None, *TREES], ids=lambda tree: str(tree and len(tree.tokens)))
def test_windows_and_sinks(tree: TokenTree | None, length: int, window: int | None, with_sink: bool) -> None:
    """A node at depth d of a tree has the position ``length + d``."""
    num_new = len(tree.tokens) if tree else 7
    q, k, v = inputs(num_new, length)
    depths = torch.tensor(tree.depths) if tree else torch.arange(num_new)
    visible = tree.visible() if tree else torch.ones(num_new, num_new, dtype=torch.bool).tril()
    positions = torch.cat((torch.arange(length), length + depths))
    seen = torch.cat((torch.ones(num_new, length, dtype=torch.bool), visible), dim=1)
    if window is not None:
        seen &= (length + depths)[:, None] - positions <= window
    sink = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64) if with_sink else None
    layer = CachedLayer(chosen_kernel("cpu", torch.float64, DIM, windows=True)[0], SCALE, window, sink)
    found = cached_attention(q, k, v, visible if tree else None, layer)
    torch.testing.assert_close(found, dense(q, k, v, seen, sink), rtol=1e-10, atol=1e-10)


def test_the_log_sum_exp_of_a_tree() -> None:
    q, k, v = inputs(3, 0)
    _, lse = tree_attention(q, k, v, torch.eye(3, dtype=torch.bool), SCALE)
    scores = torch.einsum("qhd,qhd->hq", q, k.repeat_interleave(HEADS // KV_HEADS, dim=1)) * SCALE
    torch.testing.assert_close(lse, scores)


@pytest.mark.parametrize("num_pieces", [1, 2, 3, 37])
def test_pieces_of_a_cache_are_joined(num_pieces: int) -> None:
    kernel = chosen_kernel("cpu", torch.float64, DIM)[0]
    q, k, v = inputs(5, 37)
    expected, expected_lse = kernel.forward(q, k[:37], v[:37], one_block(5, 37))
    out, lse = cache_attention(q, k[:37], v[:37], kernel, SCALE, num_pieces)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-12, atol=1e-12)


def one_block(num_new: int, length: int) -> AttentionBlock:
    return AttentionBlock(CuSeqlens((0, num_new)), CuSeqlens((0, length)), causal=False, scale=SCALE)


def test_only_few_tokens_over_a_long_cache_are_divided() -> None:
    assert [num_cache_pieces(20, length) for length in (1, 1023, 2048, 5000, 32768)] == [1, 1, 2, 4, 16]
    assert num_cache_pieces(65, 32768) == 1


def test_layers_share_the_offsets_of_a_block() -> None:
    seen = []
    reference = chosen_kernel("cpu", torch.float64, DIM, "reference")[0]

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: AttentionBlock) -> Output:
        seen.append(block)
        return reference.forward(q, k, v, block)

    kernel = dataclasses.replace(reference, forward=forward)
    q, k, v = inputs(5, 37)
    for _ in range(2):
        cache_attention(q, k[:37], v[:37], kernel, SCALE, 3)
    assert seen[0] is seen[1]
