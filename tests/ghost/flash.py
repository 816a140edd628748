"""FlashAttention 2 as torch calls it (``aten::_flash_attention_forward``), for documents of different lengths.

What users of the kernel can see is played: half precision only, head widths that are multiples of 8 up to 256, causal
and sliding windows aligned to the last key, a log-sum-exp of plus infinity for a row without keys, and values that are
not numbers in rows that no document covers.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.ghost.memory import alias, upload
from tests.ghost.scores import attend, gradients, hidden_keys

Bounds = tuple[int, int, int, int]
"""First row, end of rows, first key and end of keys of a document."""


def forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    **unused: Any,
) -> tuple[torch.Tensor, ...]:
    """Return the output [rows, heads, width of values], the log-sum-exp [heads, rows], and three random states."""
    check(query, key, value)
    assert cum_seq_q is not None, "only documents of different lengths are played"
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    rows, keys, values = map(alias, (query, key, value))
    output = torch.full((*query.shape[:2], value.shape[2]), float("nan"), dtype=query.dtype)
    sums = torch.full((query.shape[1], query.shape[0]), float("nan"))
    for bounds in documents(cum_seq_q, cum_seq_k, max_q, max_k):
        mine, own = slice(*bounds[:2]), slice(*bounds[2:])
        hidden = hidden_from_the_end(bounds, is_causal, window_size_left, window_size_right)
        part, sums[:, mine] = attend(rows[mine], keys[own], values[own], hidden, scale)
        output[mine] = part.to(query.dtype)
    device = query.device
    seeds = torch.zeros(2, dtype=torch.int64, device=device).view(torch.uint64)
    unused_seed = torch.empty(0, dtype=torch.int64, device=device).view(torch.uint64)
    no_mask = torch.empty(0, dtype=query.dtype, device=device)
    return upload(output, device), upload(sums, device), seeds, unused_seed, no_mask


def backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    cum_seq_q: torch.Tensor,
    cum_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: torch.Tensor,
    unused_seed: torch.Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    **unused: Any,
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of query, key and value, each of its tensor's shape [rows or keys, heads, width]."""
    check(query, key, value, grad_out, out)
    if logsumexp.dtype != torch.float32 or not logsumexp.is_contiguous():
        raise RuntimeError("the log-sum-exp must be float32 and contiguous")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    rows, keys, values, gradient, output = map(alias, (query, key, value, grad_out, out))
    logs = alias(logsumexp)
    found = [torch.full(one.shape, float("nan")) for one in (query, key, value)]
    for bounds in documents(cum_seq_q, cum_seq_k, max_q, max_k):
        mine, own = slice(*bounds[:2]), slice(*bounds[2:])
        hidden = hidden_from_the_end(bounds, is_causal, window_size_left, window_size_right)
        of_rows = gradient[mine], rows[mine], output[mine], logs[:, mine]
        parts = gradients(of_rows, (keys[own], values[own]), hidden, scale)
        found[0][mine], found[1][own], found[2][own] = parts
    return tuple(upload(one.to(query.dtype), query.device) for one in found)


def check(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *others: torch.Tensor) -> None:
    """Raise RuntimeError for tensors [rows or keys, heads, width] that the kernel does not take."""
    for one in (query, key, value, *others):
        if one.dtype not in (torch.float16, torch.bfloat16):
            raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
        if one.dtype != query.dtype:
            raise RuntimeError("query and key must have the same dtype")
        if one.stride(-1) != 1:
            raise RuntimeError("Input tensor must have contiguous last dimension")
        if not one.is_cuda:
            raise RuntimeError("Input tensor must be on CUDA device")
    if query.shape[-1] % 8 or query.shape[-1] > 256:
        raise RuntimeError(f"head dimension {query.shape[-1]} is not a multiple of 8 up to 256")
    if query.shape[-2] % key.shape[-2]:
        raise RuntimeError("Number of heads in key/value must divide number of heads in query")


def documents(rows: torch.Tensor, keys: torch.Tensor, max_rows: int, max_keys: int) -> list[Bounds]:
    """Return the bounds of each document from cumulative lengths of rows and keys [documents + 1]."""
    for one in (rows, keys):
        if one.dtype != torch.int32 or not one.is_cuda or not one.is_contiguous():
            raise RuntimeError("cu_seqlens must have dtype int32, be on CUDA and contiguous")
    of_rows, of_keys = alias(rows).tolist(), alias(keys).tolist()
    if len(of_rows) != len(of_keys):
        raise RuntimeError("cumulative lengths of rows and keys have different numbers of documents")
    found = [(*of_rows[i : i + 2], *of_keys[i : i + 2]) for i in range(len(of_rows) - 1)]
    longest = [max((one[at + 1] - one[at] for one in found), default=0) for at in (0, 2)]
    if longest[0] > max_rows or longest[1] > max_keys:
        raise RuntimeError(f"maxima {max_rows}, {max_keys} are below the longest document, {longest}")
    return found


def hidden_from_the_end(bounds: Bounds, is_causal: bool, left: int | None, right: int | None) -> torch.Tensor:
    """Return the mask of hidden keys [rows, keys]. The last row is aligned with the last key."""
    num_rows, num_keys = bounds[1] - bounds[0], bounds[3] - bounds[2]
    return hidden_keys(num_rows, num_keys, num_keys - num_rows, left, 0 if is_causal else right)
