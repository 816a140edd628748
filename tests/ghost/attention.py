"""Torch's memory-efficient and cuDNN attention on ghost GPUs.

They play the parts that callers can see, from torch's sources (``attention.cu`` and ``attention_backward.cu`` in
``aten/src/ATen/native/transformers/cuda``): shapes, types, alignment of head widths, the three masks, the window, and a
log-sum-exp with rows that nothing has written. ``flash.py`` has FlashAttention, ``scores.py`` the arithmetic.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.ghost import flash
from tests.ghost.memory import alias, upload
from tests.ghost.scores import attend, gradients, hidden_keys

NO_MASK, CAUSAL, CAUSAL_FROM_THE_END = 0, 1, 2
LSE_ALIGNMENT = 32
ALIGNED_BYTES = 16
CUDNN_WIDEST = 128


# ---- memory-efficient attention: tensors [batch, rows or keys, heads, width]


def efficient_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: Any,
    cu_seqlens_q: torch.Tensor | None, cu_seqlens_k: torch.Tensor | None, max_seqlen_q: int | None,
    max_seqlen_k: int | None, dropout_p: float, custom_mask_type: int, compute_log_sumexp: bool = False, *,
    scale: float | None = None, seqlen_k: Any = None, window_size: int | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """Return the output, the log-sum-exp [documents or batch, heads, padded rows], two random states, two maxima."""
    assert bias is None, "a bias is not played"
    check_efficient(query, key, value)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    q, k, v = map(alias, (query, key, value))
    bounds = places(query, key, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    longest = max((one[2] - one[1] for one in bounds), default=0) if max_seqlen_q is None else max_seqlen_q
    out = torch.full((*query.shape[:3], value.shape[3]), float("nan"), dtype=query.dtype)
    lse = torch.full((len(bounds), query.shape[2], longest + -longest % LSE_ALIGNMENT), float("nan"))
    for index, (batch, start, end, first, last) in enumerate(bounds):
        hidden = hidden_by(end - start, last - first, custom_mask_type, window_size)
        part, sums = attend(q[batch, start:end], k[batch, first:last], v[batch, first:last], hidden, scale)
        out[batch, start:end] = part.to(out.dtype)
        lse[index, :, : end - start] = sums
    device, state = query.device, torch.zeros((), dtype=torch.int64)
    sums = upload(lse, device) if compute_log_sumexp else torch.empty(0, device=device)
    states = (upload(state, device), upload(state, device))
    return upload(out, device), sums, *states, longest, key.shape[1] if max_seqlen_k is None else max_seqlen_k


def efficient_backward(
    grad_out_: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: Any, out: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None, cu_seqlens_k: torch.Tensor | None, max_seqlen_q: int, max_seqlen_k: int,
    logsumexp: torch.Tensor, dropout_p: float, philox_seed: Any, philox_offset: Any, custom_mask_type: int,
    bias_requires_grad: bool, *, scale: float | None = None, num_splits_key: int | None = None,
    window_size: int | None = None, shared_storage_dqdkdv: bool = False,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Return the gradients of query, key and value, and an empty gradient of the bias."""
    check_efficient(query, key, value)
    if logsumexp.dtype != torch.float32 or logsumexp.shape[-1] % LSE_ALIGNMENT or not logsumexp.is_contiguous():
        raise RuntimeError(f"the log-sum-exp must be float32, contiguous, and have a multiple of {LSE_ALIGNMENT} rows")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    of_out, q, k, v, output, lse = map(alias, (grad_out_, query, key, value, out, logsumexp))
    found = [torch.full(one.shape, float("nan"), dtype=one.dtype) for one in (query, key, value)]
    bounds = places(query, key, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    for index, (batch, start, end, first, last) in enumerate(bounds):
        hidden = hidden_by(end - start, last - first, custom_mask_type, window_size)
        rows = (*(one[batch, start:end] for one in (of_out, q, output)), lse[index, :, : end - start])
        parts = gradients(rows, (k[batch, first:last], v[batch, first:last]), hidden, scale)  # type: ignore[arg-type]
        found[0][batch, start:end] = parts[0].to(query.dtype)
        for place in (1, 2):
            found[place][batch, first:last] = parts[place].to(query.dtype)
    return *(upload(one, query.device) for one in found), torch.empty(0, dtype=query.dtype, device=query.device)


def check_efficient(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """Raise RuntimeError for tensors that the kernel does not take."""
    for one in (query, key, value):
        if one.dim() != 4 or one.dtype != query.dtype or one.stride(-1) != 1:
            raise RuntimeError("query, key and value must be [batch, rows, heads, width] of one type and contiguous")
        if one.shape[-1] * one.element_size() % ALIGNED_BYTES:
            raise RuntimeError(f"attention heads of {one.shape[-1]} are not aligned to {ALIGNED_BYTES} bytes")
    if not query.shape[2] == key.shape[2] == value.shape[2]:
        raise RuntimeError("query, key and value must have as many heads")


def places(
    query: torch.Tensor, key: torch.Tensor, rows: Any, keys: Any, max_rows: int | None, max_keys: int | None
) -> list[tuple[int, int, int, int, int]]:
    """Return the batch and the bounds of rows and keys of each document; without offsets, of each batch."""
    if rows is None:
        return [(index, 0, query.shape[1], 0, key.shape[1]) for index in range(query.shape[0])]
    if query.shape[0] != 1 or max_rows is None:
        raise RuntimeError("cu_seqlen only supports batch_size=1, and needs max_seqlen_q")
    longest = key.shape[1] if max_keys is None else max_keys
    return [(0, *bounds) for bounds in flash.documents(rows, keys, max_rows, longest)]


def hidden_by(num_rows: int, num_keys: int, mask_type: int, window: int | None) -> torch.Tensor:
    """Return the mask of hidden keys [rows, keys]. A window includes the query's own key."""
    has_window = window is not None and window > 0
    if has_window and mask_type == NO_MASK:
        raise RuntimeError("a window needs a causal mask")
    offset = num_keys - num_rows if mask_type == CAUSAL_FROM_THE_END else 0
    left = window - 1 if window is not None and has_window else None
    return hidden_keys(num_rows, num_keys, offset, left, None if mask_type == NO_MASK else 0)


# ---- cuDNN: tensors [batch, heads, rows or keys, width], a causal mask that is aligned with the first key


def cudnn_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_bias: Any, compute_log_sumexp: bool,
    dropout_p: float = 0.0, is_causal: bool = False, return_debug_mask: bool = False, *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """Return the output, the log-sum-exp [batch, heads, rows, 1], and what varlen calls and dropout would save."""
    assert attn_bias is None, "a bias is not played"
    check_cudnn(query, key, value)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    num_rows, num_keys, device = query.shape[2], key.shape[2], query.device
    hidden = hidden_keys(num_rows, num_keys, 0, None, 0 if is_causal else None)
    q, k, v = (alias(one).transpose(1, 2) for one in (query, key, value))
    parts = [attend(q[batch], k[batch], v[batch], hidden, scale) for batch in range(len(q))]
    out = torch.stack([part for part, _ in parts]).to(query.dtype).transpose(1, 2)
    lse = torch.stack([sums for _, sums in parts])[..., None]
    empty, state = torch.empty(0, dtype=torch.int32, device=device), torch.zeros((), dtype=torch.int64)
    states = (upload(state, device), upload(state, device))
    return upload(out, device), upload(lse, device), empty, empty, num_rows, num_keys, *states, empty


def cudnn_backward(
    grad_out: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor,
    logsumexp: torch.Tensor, philox_seed: Any, philox_offset: Any, attn_bias: Any, cum_seq_q: Any, cum_seq_k: Any,
    max_q: int, max_k: int, dropout_p: float, is_causal: bool, *, scale: float | None = None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Return the gradients of query, key and value."""
    check_cudnn(query, key, value)
    if logsumexp.dtype != torch.float32 or logsumexp.shape != (*query.shape[:3], 1):
        raise RuntimeError("the log-sum-exp must be float32 [batch, heads, rows, 1]")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    hidden = hidden_keys(query.shape[2], key.shape[2], 0, None, 0 if is_causal else None)
    of_out, q, k, v, output = (alias(one).transpose(1, 2) for one in (grad_out, query, key, value, out))
    lse = alias(logsumexp)[..., 0]
    parts = [
        gradients((of_out[batch], q[batch], output[batch], lse[batch]), (k[batch], v[batch]), hidden, scale)
        for batch in range(len(q))
    ]
    grads = (torch.stack(part).to(query.dtype).transpose(1, 2) for part in zip(*parts, strict=True))
    return tuple(upload(one, query.device) for one in grads)


def check_cudnn(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """Raise RuntimeError for tensors that the kernel does not take."""
    for one in (query, key, value):
        if one.dim() != 4 or one.dtype not in (torch.float16, torch.bfloat16) or one.stride(-1) != 1:
            raise RuntimeError("query, key and value must be [batch, heads, rows, width], fp16 or bf16, contiguous")
        if one.shape[-1] % 8 or one.shape[-1] > CUDNN_WIDEST:
            raise RuntimeError(f"head width {one.shape[-1]} is not a multiple of 8 up to {CUDNN_WIDEST}")
    if query.shape[1] % key.shape[1]:
        raise RuntimeError("the number of query heads must be a multiple of the number of key heads")
