"""Attention of new tokens over a cache of keys and over each other.

The new tokens are a slice of a prompt or a tree of guesses. The cache is one block without a mask, which a kernel of
the table computes. A slice is a causal block for the same kernel. The few scores of a tree are computed here. The two
results are joined by their log-sum-exp.
"""

from __future__ import annotations

import torch

from bytescale_ext.attention.kernels.contract import Output, accumulation_dtype
from bytescale_ext.attention.kernels.table import Kernel
from bytescale_ext.attention.layouts.blocks import AttentionBlock
from bytescale_ext.attention.layouts.rows import CuSeqlens
from bytescale_ext.attention.merge import merge_


def cached_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor | None, kernel: Kernel, scale: float
) -> torch.Tensor:
    """Return the attention [t, heads, dim] of new tokens.

    Args:
        q: queries of the new tokens, [t, heads, dim].
        k: keys of the cache, then keys of the new tokens, [length + t, kv_heads, dim].
        v: values in the same order and shape as ``k``.
        visible: new tokens that each new token attends to, bool [t, t]; None for causal attention.
        kernel: attention kernel from the table.
        scale: factor of the scores.
    """
    num_new = q.shape[0]
    length = k.shape[0] - num_new
    new = CuSeqlens((0, num_new))
    if visible is None:
        out, lse = kernel.forward(q, k[length:], v[length:], AttentionBlock(new, new, causal=True, scale=scale))
    else:
        out, lse = tree_attention(q, k[length:], v[length:], visible, scale)
    if not length:
        return out
    total = out.to(accumulation_dtype(q.dtype))
    block = AttentionBlock(new, CuSeqlens((0, length)), causal=False, scale=scale)
    merge_(total, lse, *kernel.forward(q, k[:length], v[:length], block))
    return total.to(q.dtype)


def tree_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, scale: float) -> Output:
    """Return ``out [t, heads, dim]`` and ``lse [heads, t]`` of attention between the nodes of a tree.

    ``q``: [t, heads, dim]; ``k, v``: [t, kv_heads, dim]; ``visible``: nodes that each node attends to, bool [t, t], at
    least one per row.
    """
    dtype = accumulation_dtype(q.dtype)
    keys, values = (tensor.to(dtype).repeat_interleave(q.shape[1] // tensor.shape[1], dim=1) for tensor in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.to(dtype), keys) * scale
    scores = scores.masked_fill(~visible.to(scores.device), -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).to(q.dtype), scores.logsumexp(-1)
