"""Attention of new tokens over a cache of latents, in place of keys and values (``attention/latent.py``).

A slice of a prompt has many queries. Keys and values are expanded from the latents, a part of the cache at a time, for
a kernel of the table. A few new tokens read the latents themselves: the projection that would make a key is applied to
the query, and the projection that would make a value to the result (DeepSeek-V2, section 2.1.2)::

    q . (latent W_content) = (q W_content') . latent        sum_j p_j (latent_j W_value) = (sum_j p_j latent_j) W_value

So all heads share one key, the latent with the part that has positions, and one value, the latent.
"""

from __future__ import annotations

from typing import Final

import torch

from bytescale_ext.attention.kernels.contract import Output, accumulation_dtype
from bytescale_ext.attention.latent import Expansion
from bytescale_ext.attention.merge import merge_
from bytescale_ext.decode.attention import (
    MOST_NEW_TOKENS,
    CachedLayer,
    attention_in_window,
    cache_attention,
    new_attention,
    tree_attention,
    visible_in_window,
    with_sink,
)

EXPANDED_ROWS: Final = 8192
"""Most latents of the cache that are expanded at once."""
MOST_SCORES: Final = 2**26
"""Most scores of queries and latents that exist at once."""


def latent_attention(
    q: torch.Tensor, latents: torch.Tensor, visible: torch.Tensor | None, layer: CachedLayer, expansion: Expansion
) -> torch.Tensor:
    """Return the attention [t, heads, value_dim] of new tokens.

    Args:
        q: queries of the new tokens, [t, heads, content_dim + position_dim].
        latents: latents of the cache, then latents of the new tokens, [length + t, key_rank + position_dim].
        visible: new tokens that each new token attends to, bool [t, t]; None for causal attention.
        layer: attention of the layer.
        expansion: projection to keys and values.
    """
    num_new = q.shape[0]
    if layer.window is not None:
        latents = latents[-(min(layer.window, len(latents) - num_new) + num_new) :]
    if visible is None:
        if num_new > MOST_NEW_TOKENS:
            return with_sink(*_over_expanded(q, latents, layer, expansion), layer, q.dtype)
        visible = torch.ones(num_new, num_new, dtype=torch.bool, device=q.device).tril()
    contents, values = expansion.weight.unflatten(0, (-1, sum(expansion.sizes))).split(expansion.sizes, dim=1)
    of_contents, of_positions = q.split([expansion.sizes[0], expansion.position_dim], dim=2)
    absorbed = torch.cat((torch.einsum("thc,hcr->thr", of_contents, contents), of_positions), dim=2)
    out, lse = _over_latents(absorbed, latents, visible, layer, values.shape[2])
    return torch.einsum("thr,hvr->thv", with_sink(out, lse, layer, q.dtype), values)


def _over_latents(
    q: torch.Tensor, latents: torch.Tensor, visible: torch.Tensor, layer: CachedLayer, key_rank: int
) -> Output:
    """Return ``out [t, heads, key_rank]`` and ``lse [heads, t]`` of queries [t, heads, key_rank + position_dim]."""
    num_new, heads, _ = q.shape
    length = latents.shape[0] - num_new
    keys, values = latents[:, None], latents[:, None, :key_rank]
    if layer.window is not None:
        return tree_attention(q, keys, values, visible_in_window(visible, length, layer.window), layer.scale)
    out, lse = tree_attention(q, keys[length:], values[length:], visible, layer.scale)
    total, step = out.to(accumulation_dtype(q.dtype)), max(1, MOST_SCORES // (heads * num_new))
    for start in range(0, length, step):
        rows = slice(start, min(start + step, length))
        merge_(total, lse, *tree_attention(q, keys[rows], values[rows], None, layer.scale))
    return total, lse


def _over_expanded(q: torch.Tensor, latents: torch.Tensor, layer: CachedLayer, expansion: Expansion) -> Output:
    """Return ``out [t, heads, value_dim]`` and ``lse [heads, t]`` of a slice of a prompt."""
    length = latents.shape[0] - q.shape[0]
    if layer.window is not None:
        return attention_in_window(q, *expansion.expand_whole(latents), None, layer)
    out, lse = new_attention(q, *expansion.expand_whole(latents[length:]), None, layer)
    total = out.to(accumulation_dtype(q.dtype))
    for start in range(0, length, EXPANDED_ROWS):
        k, v = expansion.expand_whole(latents[start : min(start + EXPANDED_ROWS, length)])
        merge_(total, lse, *cache_attention(q, k, v, layer.kernel, layer.scale, 1))
    return total, lse
