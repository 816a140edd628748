"""Attention of new tokens over a cache of keys and over each other.

The new tokens are a slice of a prompt or a tree of guesses. The cache is one block without a mask, which a kernel of
the table computes. A slice is a causal block for the same kernel. The few scores of a tree are computed here. The two
results are joined by their log-sum-exp.

A GPU computes one tile of queries of a head with one of its multiprocessors, so a few new tokens over a long cache
would use few of them. There the cache is divided into pieces, which are documents of one kernel call with the same
queries, and their results are joined as well (Flash-Decoding, Dao et al. 2023).

In a layer with a window, only the end of the cache counts. A slice is one causal block with a window. The scores of a
tree and of the end of the cache are computed together.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Final

import torch

from bytescale_ext.attention.kernels.contract import Output, accumulation_dtype
from bytescale_ext.attention.kernels.table import Kernel
from bytescale_ext.attention.layouts.blocks import AttentionBlock, PlacedBlock
from bytescale_ext.attention.layouts.rows import CuSeqlens
from bytescale_ext.attention.merge import merge_
from bytescale_ext.attention.sink import add_sink_

MOST_NEW_TOKENS: Final = 64
"""Largest number of new tokens over a divided cache; more tokens fill a GPU without pieces."""
PIECE_KEYS: Final = 1024
"""Smallest number of keys of a piece."""
MOST_PIECES: Final = 16


@dataclass(frozen=True)
class CachedLayer:
    """Attention of a layer.

    Attributes:
        kernel: attention kernel from the table.
        scale: factor of the scores.
        window: the most keys before its own key that a query sees; None: all.
        sink: attention sink of each head, ``[heads]`` (``attention/sink.py``), or None.
    """

    kernel: Kernel
    scale: float
    window: int | None = None
    sink: torch.Tensor | None = None


def cached_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor | None, layer: CachedLayer
) -> torch.Tensor:
    """Return the attention [t, heads, dim] of new tokens.

    Args:
        q: queries of the new tokens, [t, heads, dim].
        k: keys of the cache, then keys of the new tokens, [length + t, kv_heads, dim].
        v: values in the same order and shape as ``k``.
        visible: new tokens that each new token attends to, bool [t, t]; None for causal attention.
        layer: attention of the layer.
    """
    find = _attention if layer.window is None else attention_in_window
    return with_sink(*find(q, k, v, visible, layer), layer, q.dtype)


def with_sink(out: torch.Tensor, lse: torch.Tensor, layer: CachedLayer, dtype: torch.dtype) -> torch.Tensor:
    """Return the output [t, heads, dim] in a dtype, with the layer's sink if it has one; ``lse``: [heads, t]."""
    if layer.sink is not None:
        out = out.to(lse.dtype)
        add_sink_(out, lse, layer.sink)
    return out.to(dtype)


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor | None, layer: CachedLayer
) -> Output:
    """Return ``out [t, heads, dim]`` and ``lse [heads, t]`` of queries that see the whole cache."""
    num_new = q.shape[0]
    length = k.shape[0] - num_new
    out, lse = new_attention(q, k[length:], v[length:], visible, layer)
    if not length:
        return out, lse
    total = out.to(accumulation_dtype(q.dtype))
    num_pieces = num_cache_pieces(num_new, length) if q.is_cuda else 1
    merge_(total, lse, *cache_attention(q, k[:length], v[:length], layer.kernel, layer.scale, num_pieces))
    return total, lse


def new_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor | None, layer: CachedLayer
) -> Output:
    """Return ``out [t, heads, dim]`` and ``lse [heads, t]`` of new tokens over each other, without a window."""
    if visible is not None:
        return tree_attention(q, k, v, visible, layer.scale)
    new = CuSeqlens((0, q.shape[0]))
    return layer.kernel.forward(q, k, v, AttentionBlock(new, new, causal=True, scale=layer.scale))


def attention_in_window(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor | None, layer: CachedLayer
) -> Output:
    """Return ``out [t, heads, dim]`` and ``lse [heads, t]`` of queries that see the keys of their window."""
    assert layer.window is not None, f"{layer=}"
    num_new = q.shape[0]
    num_keys = min(layer.window, k.shape[0] - num_new) + num_new
    k, v = k[-num_keys:], v[-num_keys:]
    if visible is None:
        block = _block_in_window(num_new, num_keys, layer.window, layer.scale)
        return layer.kernel.forward(q, k, v, block)
    return tree_attention(q, k, v, visible_in_window(visible, num_keys - num_new, layer.window), layer.scale)


def visible_in_window(visible: torch.Tensor, num_cached: int, window: int) -> torch.Tensor:
    """Return the last keys of the cache, and the nodes of a tree, that each node sees: bool [t, num_cached + t].

    ``visible``: nodes that each node would see without a window, itself included: bool [t, t].
    """
    depths = visible.sum(1) - 1
    behind = torch.arange(num_cached, 0, -1, device=visible.device)  # distance to the root of the tree
    of_cache = depths[:, None] + behind <= window
    of_tree = visible & (depths[:, None] - depths <= window)
    return torch.cat((of_cache, of_tree), dim=1)


@lru_cache(maxsize=256)
def _block_in_window(num_new: int, num_keys: int, window: int, scale: float) -> AttentionBlock:
    """Return the causal block of new tokens at the end of these keys, with a window if it hides any."""
    return PlacedBlock.in_window([(0, num_new)], [(0, num_keys)], window).attention(scale)


def num_cache_pieces(num_new: int, length: int) -> int:
    """Return the number of pieces into which a GPU divides a cache of ``length`` keys for ``num_new`` queries."""
    return 1 if num_new > MOST_NEW_TOKENS else max(1, min(MOST_PIECES, length // PIECE_KEYS))


def cache_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kernel: Kernel, scale: float, num_pieces: int
) -> Output:
    """Return ``out [t, heads, dim]`` and ``lse [heads, t]`` of queries that see all keys, in one call of the kernel.

    Args:
        q: queries, [t, heads, dim].
        k: keys, [length, kv_heads, dim].
        v: values, in the shape of ``k``.
        kernel: attention kernel from the table.
        scale: factor of the scores.
        num_pieces: number of pieces that the keys are divided into, at most ``length``. With more than one, ``out`` has
            the accumulation dtype.
    """
    num_new = q.shape[0]
    block = _block_of_pieces(num_new, k.shape[0], num_pieces, scale)
    if num_pieces == 1:
        return kernel.forward(q, k, v, block)
    out, lse = kernel.forward(q.repeat(num_pieces, 1, 1), k, v, block)
    of_pieces = lse.unflatten(1, (num_pieces, num_new))
    total = of_pieces.logsumexp(1)
    shares = (of_pieces - total[:, None]).exp().permute(1, 2, 0)[..., None]  # [pieces, t, heads, 1]
    return (out.to(lse.dtype).unflatten(0, (num_pieces, num_new)) * shares).sum(0), total


@lru_cache(maxsize=256)  # all layers of a pass have equal blocks, whose offsets are copied to the device once
def _block_of_pieces(num_new: int, length: int, num_pieces: int, scale: float) -> AttentionBlock:
    """Return the block whose documents are the pieces of a cache, each with all new tokens."""
    sizes = [length // num_pieces + (piece < length % num_pieces) for piece in range(num_pieces)]
    cu_q = CuSeqlens(tuple(range(0, num_new * num_pieces + 1, num_new)))
    return AttentionBlock(cu_q, CuSeqlens(tuple(accumulate(sizes, initial=0))), causal=False, scale=scale)


def tree_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor | None, scale: float
) -> Output:
    """Return ``out [t, heads, value_dim]`` and ``lse [heads, t]`` of attention between the nodes of a tree.

    Args:
        q: queries, [t, heads, dim].
        k: keys, [n, kv_heads, dim].
        v: values, [n, kv_heads, value_dim].
        visible: keys that each node attends to, bool [t, n], at least one per row; None: all.
        scale: factor of the scores.
    """
    dtype = accumulation_dtype(q.dtype)
    grouped = q.to(dtype).unflatten(1, (k.shape[1], -1))
    scores = torch.einsum("qkgd,nkd->kgqn", grouped, k.to(dtype)) * scale
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    out = torch.einsum("kgqn,nkd->qkgd", scores.softmax(-1), v.to(dtype)).flatten(1, 2)
    return out.to(q.dtype), scores.logsumexp(-1).flatten(0, 1)
