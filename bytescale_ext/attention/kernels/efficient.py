"""Torch's memory-efficient attention on CUDA, for float32 and for head sizes that flash attention does not take.

``contract.py`` has the shapes and dtypes of all functions. The operator takes as many key heads as query heads, and
head sizes whose rows are aligned. So key heads are repeated, and heads are padded with zeros, which change no score.
Its log-sum-exp has as many rows for each document as the longest one needs. So only documents of similar length share a
call, and these rows are at most about twice the queries, whatever the mixture of lengths.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

import torch

from bytescale_ext.attention.kernels.contract import Gradients, Output, Saved, empty_output
from bytescale_ext.attention.layouts.blocks import AttentionBlock, Interval, PlacedBlock
from bytescale_ext.attention.layouts.rows import CuSeqlens

aten = torch.ops.aten

OPERATORS = ("_efficient_attention_forward", "_efficient_attention_backward")
NO_MASK, CAUSAL, CAUSAL_FROM_THE_END = 0, 1, 2
"""Values of ``custom_mask_type``: all keys of a document, those up to the place of the query counted from the first
key, or counted from the last key."""
HEAD_ALIGNMENT = 8
"""Head sizes are padded to a multiple of this: 16 bytes in half precision."""
LSE_ALIGNMENT = 32
"""The operator's backward pass takes log-sum-exps with a multiple of this many rows."""
GROUPINGS = 32
"""Groupings to cache, each with its row indices on the device; enough for the layouts of a few micro-batches."""


def efficient_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: AttentionBlock) -> Output:
    """Call ``aten::_efficient_attention_forward``: ``out [tq, heads, dim]`` and ``lse [heads, tq]``."""
    out, lse = empty_output(q)
    for group in similar_documents(block.cu_q, block.cu_k):
        part, part_lse = _forward(group.queries.take(q), group.keys.take(k), group.keys.take(v), group, block)
        group.queries.put_(out, part)
        group.queries.put_(lse, part_lse, dim=1)
    return out, lse


def efficient_backward(dout: torch.Tensor, saved: Saved, block: AttentionBlock) -> Gradients:
    """Call ``aten::_efficient_attention_backward``: ``dq, dk, dv`` of the shapes of ``q, k, v``."""
    q, k, v, out, lse = saved
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for group in similar_documents(block.cu_q, block.cu_k):
        rows, keys = group.queries, group.keys
        of_group = Saved(rows.take(q), keys.take(k), keys.take(v), rows.take(out), rows.take(lse, dim=1))
        grads = _backward(rows.take(dout), of_group, group, block)
        rows.put_(dq, grads[0])
        keys.put_(dk, grads[1])
        keys.put_(dv, grads[2])
    return dq, dk, dv


@lru_cache(maxsize=GROUPINGS)
def similar_documents(cu_q: CuSeqlens, cu_k: CuSeqlens) -> tuple[PlacedBlock, ...]:
    """Return the documents that have queries and keys, grouped so that the longest has less than twice the shortest.

    Lengths are counted in queries. The layers and ring passes of a micro-batch ask again for the same offsets.
    """
    groups: dict[int, list[tuple[Interval, Interval]]] = {}
    for queries, keys in zip(pairwise(cu_q.offsets), pairwise(cu_k.offsets), strict=True):
        groups.setdefault((queries[1] - queries[0]).bit_length(), []).append((queries, keys))
    blocks = (PlacedBlock.of([q for q, _ in group], [k for _, k in group]) for _, group in sorted(groups.items()))
    return tuple(block for block in blocks if not block.is_empty)


def _forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: PlacedBlock, block: AttentionBlock) -> Output:
    """Return ``out [tq, heads, dim]`` and ``lse [heads, tq]`` of a group's rows ``q [tq, ...]``, ``k, v [tk, ...]``."""
    repeats, dim = q.shape[1] // k.shape[1], q.shape[2]
    out, lse, *_ = aten._efficient_attention_forward(
        _aligned(q), _aligned(k, repeats), _aligned(v, repeats), None, *_documents(group, q.device), 0.0,
        _mask_type(block), True, scale=block.scale, window_size=_window(block),
    )  # fmt: skip
    return out[0, ..., :dim], _by_row(lse, group.cu_q)


def _backward(dout: torch.Tensor, saved: Saved, group: PlacedBlock, block: AttentionBlock) -> Gradients:
    """Return ``dq [tq, heads, dim]`` and ``dk, dv [tk, kv_heads, dim]`` of a group's rows."""
    q, k, v, out, lse = saved
    repeats, dim = q.shape[1] // k.shape[1], q.shape[2]
    unused = torch.zeros((), dtype=torch.int64, device=q.device)  # the random state, without dropout
    dq, dk, dv, _ = aten._efficient_attention_backward(
        _aligned(dout), _aligned(q), _aligned(k, repeats), _aligned(v, repeats), None, _aligned(out),
        *_documents(group, q.device), _by_document(lse, group.cu_q), 0.0, unused, unused,
        _mask_type(block), False, scale=block.scale, window_size=_window(block),
    )  # fmt: skip
    of_heads = (grad[0, ..., :dim].unflatten(1, (k.shape[1], repeats)).sum(2) for grad in (dk, dv))
    return dq[0, ..., :dim], next(of_heads), next(of_heads)


def _mask_type(block: AttentionBlock) -> int:
    if block.window is not None:
        return CAUSAL_FROM_THE_END
    return CAUSAL if block.causal else NO_MASK


def _window(block: AttentionBlock) -> int | None:
    """Return the operator's size of a window, which counts the query's own key."""
    return None if block.window is None else block.window + 1


def _documents(group: PlacedBlock, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """Return offsets of queries and keys, int32 ``[num_documents + 1]`` each, and the longest document of each."""
    return group.cu_q.on(device), group.cu_k.on(device), group.cu_q.longest, group.cu_k.longest


def _aligned(x: torch.Tensor, repeats: int = 1) -> torch.Tensor:
    """Return ``[t, heads, dim]`` as ``[1, t, heads * repeats, padded dim]``, contiguous, padded with zeros."""
    padding = -x.shape[2] % HEAD_ALIGNMENT
    x = torch.nn.functional.pad(x, (0, padding)) if padding else x
    return (x.repeat_interleave(repeats, dim=1) if repeats > 1 else x).contiguous().unsqueeze(0)


def _by_row(lse: torch.Tensor, cu: CuSeqlens) -> torch.Tensor:
    """Return ``lse [num_documents, heads, padded rows]`` of the operator as ``[heads, rows]``."""
    if cu.num_documents == 1:
        return lse[0, :, : cu.num_tokens]
    document, place = _places(cu, lse.device)
    return lse[document, :, place].t()


def _by_document(lse: torch.Tensor, cu: CuSeqlens) -> torch.Tensor:
    """Return ``lse [heads, rows]`` as the operator takes it; rows beyond a document are infinite, so that they have no
    weight: ``[num_documents, heads, padded rows]``.
    """
    padded_rows = cu.longest + -cu.longest % LSE_ALIGNMENT
    padded = torch.full((cu.num_documents, lse.shape[0], padded_rows), torch.inf, dtype=lse.dtype, device=lse.device)
    if cu.num_documents == 1:
        padded[0, :, : cu.num_tokens] = lse
    else:
        document, place = _places(cu, lse.device)
        padded[document, :, place] = lse.t()
    return padded


def _places(cu: CuSeqlens, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the document of each row and its place in it, int64 ``[rows]`` each, computed on the device."""
    offsets = cu.on(device)
    rows = torch.arange(cu.num_tokens, dtype=torch.int32, device=device)
    document = torch.searchsorted(offsets[1:], rows, right=True)
    return document, (rows - offsets[document]).long()
