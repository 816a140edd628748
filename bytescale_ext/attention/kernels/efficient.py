"""Torch's memory-efficient attention on CUDA, for float32 and for head sizes that flash attention does not take.

``contract.py`` has the shapes and dtypes of all functions. The operator needs as many key heads as query heads, and
aligned head sizes. So key heads are repeated, and heads are padded with zeros, which change no score. The operator's
log-sum-exp is padded to the longest document of the call. So only documents of similar length share a call. The padded
log-sum-exp then has at most about twice as many rows as there are queries, for any mixture of lengths.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

import torch

from bytescale_ext.attention.kernels.contract import Gradients, Output, Saved, empty_output, packed_documents
from bytescale_ext.attention.layouts.blocks import AttentionBlock, Interval, PlacedBlock
from bytescale_ext.attention.layouts.rows import CuSeqlens

aten = torch.ops.aten

OPERATORS = ("_efficient_attention_forward", "_efficient_attention_backward")
NO_MASK, CAUSAL, CAUSAL_FROM_THE_END = 0, 1, 2
"""Values of ``custom_mask_type``: no mask, and causal masks aligned to the first key and to the last key."""
HEAD_ALIGNMENT = 8
"""Head sizes are padded to a multiple of 8, which are 16 bytes in half precision."""
LSE_ALIGNMENT = 32
"""Rows of the log-sum-exp in the operator's backward pass must be a multiple of 32."""
GROUPINGS = 32
"""Number of cached groupings, with row indices on the device. It suffices for the layouts of a few micro-batches."""


def efficient_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: AttentionBlock) -> Output:
    """Call ``aten::_efficient_attention_forward``: ``out [tq, heads, dim]`` and ``lse [heads, tq]``."""
    out, lse = empty_output(q, value_dim=v.shape[2])
    for group in similar_documents(block.cu_q, block.cu_k):
        group_out, group_lse = _forward(group.queries.take(q), group.keys.take(k), group.keys.take(v), group, block)
        group.queries.put_(out, group_out)
        group.queries.put_(lse, group_lse, dim=1)
    return out, lse


def efficient_backward(dout: torch.Tensor, saved: Saved, block: AttentionBlock) -> Gradients:
    """Call ``aten::_efficient_attention_backward``: ``dq, dk, dv`` of the shapes of ``q, k, v``."""
    q, k, v, out, lse = saved
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for group in similar_documents(block.cu_q, block.cu_k):
        rows, keys = group.queries, group.keys
        group_saved = Saved(rows.take(q), keys.take(k), keys.take(v), rows.take(out), rows.take(lse, dim=1))
        grads = _backward(rows.take(dout), group_saved, group, block)
        rows.put_(dq, grads[0])
        keys.put_(dk, grads[1])
        keys.put_(dv, grads[2])
    return dq, dk, dv


@lru_cache(maxsize=GROUPINGS)
def similar_documents(cu_q: CuSeqlens, cu_k: CuSeqlens) -> tuple[PlacedBlock, ...]:
    """Group the documents with queries and keys, so that the longest of a group is less than twice the shortest.

    Lengths are counted in queries. Cached, because the layers and ring passes of a micro-batch repeat the same offsets.
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
        _aligned(q), _aligned(k, repeats), _aligned(v, repeats), None, *packed_documents(group, q.device), 0.0,
        _mask_type(block), True, scale=block.scale, window_size=_window(block),
    )  # fmt: skip
    return out[0, ..., :dim], _by_row(lse, group.cu_q)


def _backward(dout: torch.Tensor, saved: Saved, group: PlacedBlock, block: AttentionBlock) -> Gradients:
    """Return ``dq [tq, heads, dim]`` and ``dk, dv [tk, kv_heads, dim]`` of a group's rows."""
    q, k, v, out, lse = saved
    repeats, dim = q.shape[1] // k.shape[1], q.shape[2]
    unused = torch.zeros((), dtype=torch.int64, device=q.device)  # random state of dropout
    dq, dk, dv, _ = aten._efficient_attention_backward(
        _aligned(dout), _aligned(q), _aligned(k, repeats), _aligned(v, repeats), None, _aligned(out),
        *packed_documents(group, q.device), _by_document(lse, group.cu_q), 0.0, unused, unused,
        _mask_type(block), False, scale=block.scale, window_size=_window(block),
    )  # fmt: skip
    dk, dv = (grad[0, ..., :dim].unflatten(1, (k.shape[1], repeats)).sum(2) for grad in (dk, dv))
    return dq[0, ..., :dim], dk, dv


def _mask_type(block: AttentionBlock) -> int:
    if block.window is not None:
        return CAUSAL_FROM_THE_END
    return CAUSAL if block.causal else NO_MASK


def _window(block: AttentionBlock) -> int | None:
    """Return the operator's window size, which includes the query's own key."""
    return None if block.window is None else block.window + 1


def _aligned(x: torch.Tensor, repeats: int = 1) -> torch.Tensor:
    """Return ``[t, heads, dim]`` as contiguous ``[1, t, heads * repeats, padded dim]``, padded with zeros."""
    padding = -x.shape[2] % HEAD_ALIGNMENT
    x = torch.nn.functional.pad(x, (0, padding)) if padding else x
    return (x.repeat_interleave(repeats, dim=1) if repeats > 1 else x).contiguous().unsqueeze(0)


def _by_row(lse: torch.Tensor, cu: CuSeqlens) -> torch.Tensor:
    """Convert the operator's ``lse [num_documents, heads, padded rows]`` to ``[heads, rows]``."""
    if cu.num_documents == 1:
        return lse[0, :, : cu.num_tokens]
    document, place = _places(cu, lse.device)
    return lse[document, :, place].t()


def _by_document(lse: torch.Tensor, cu: CuSeqlens) -> torch.Tensor:
    """Convert ``lse [heads, rows]`` to the operator's ``[num_documents, heads, padded rows]``.

    The padding is infinite, so that it has no weight.
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
    """Return the document of each row and its position in the document, int64 ``[rows]`` each, without a sync."""
    offsets = cu.on(device)
    rows = torch.arange(cu.num_tokens, dtype=torch.int32, device=device)
    document = torch.searchsorted(offsets[1:], rows, right=True)
    return document, (rows - offsets[document]).long()
