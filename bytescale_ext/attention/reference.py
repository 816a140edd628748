"""Attention written out in full: the oracle of every kernel and of the ring.

Everything is a plain matmul of one document at a time, in float64 for float64 inputs and float32 otherwise.
It stores a score matrix of ``heads x queries x keys``, so it is for tests and small inputs.
"""

from __future__ import annotations

import torch

from bytescale_ext.attention.rows import CuSeqlens


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of log-sum-exp values and of sums over blocks: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def dense_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: CuSeqlens, scale: float
) -> torch.Tensor:
    """Causal attention inside each document, differentiable by autograd.

    Args:
        q: ``[t, heads, dim]``.
        k, v: ``[t, kv_heads, dim]``; ``heads`` is a multiple of ``kv_heads`` (grouped-query attention).
        documents: offsets of the documents; rows after the last one are padding.
        scale: factor of the scores.

    Returns:
        ``[t, heads, dim]`` in the dtype of ``q``; padding rows are zero.
    """
    parts = []
    for start, stop in zip(documents.offsets, documents.offsets[1:], strict=False):
        rows = slice(start, stop)
        scores = block_scores(q[rows], k[rows], causal=True, scale=scale)
        parts.append(_weighted_values(torch.softmax(scores, dim=-1), v[rows]).to(q.dtype))
    parts.append(torch.zeros_like(q[documents.num_tokens :]))
    return torch.cat(parts)


def block_scores(q: torch.Tensor, k: torch.Tensor, causal: bool, scale: float) -> torch.Tensor:
    """Scaled scores ``[kv_heads, heads / kv_heads, queries, keys]``, minus infinity where a key is not seen."""
    dtype = accumulation_dtype(q.dtype)
    scores = torch.einsum("qngd,knd->ngqk", _grouped(q, k.shape[1]).to(dtype), k.to(dtype)) * scale
    if causal:
        assert q.shape[0] == k.shape[0], f"{q.shape=} {k.shape=}"
        unseen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(unseen, -torch.inf)
    return scores


def reference_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """One block: ``out [queries, heads, dim]`` and ``lse [heads, queries]`` (accumulation dtype).

    ``causal`` asks for as many keys as queries. With no keys ``out`` is 0 and ``lse`` minus infinity.
    """
    if k.shape[0] == 0:
        lse = torch.full(q.shape[1::-1], -torch.inf, dtype=accumulation_dtype(q.dtype), device=q.device)
        return torch.zeros_like(q), lse
    scores = block_scores(q, k, causal, scale)
    lse = torch.logsumexp(scores, dim=-1)
    out = _weighted_values(torch.exp(scores - lse.unsqueeze(-1)), v)
    return out.to(q.dtype), lse.flatten(0, 1)


def reference_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of one block, given the output and log-sum-exp over *all* keys of these queries.

    ``out`` and ``lse`` may include keys outside this block: the probabilities are ``exp(score - lse)`` and the
    correction is ``rowsum(dout * out)``, so the gradients of blocks add up to those of the whole
    (FlashAttention-2, Algorithm 2). Shapes as in ``reference_forward``; returns ``(dq, dk, dv)``.
    """
    dtype = accumulation_dtype(q.dtype)
    kv_heads = k.shape[1]
    scores = block_scores(q, k, causal, scale)
    probabilities = torch.exp(scores - lse.to(dtype).view(*scores.shape[:3], 1))
    dout_grouped = _grouped(dout, kv_heads).to(dtype)
    delta = (dout_grouped * _grouped(out, kv_heads).to(dtype)).sum(-1).permute(1, 2, 0).unsqueeze(-1)
    dv = torch.einsum("ngqk,qngd->knd", probabilities, dout_grouped)
    dprobabilities = torch.einsum("qngd,knd->ngqk", dout_grouped, v.to(dtype))
    dscores = probabilities * (dprobabilities - delta) * scale
    dq = torch.einsum("ngqk,knd->qngd", dscores, k.to(dtype)).flatten(1, 2)
    dk = torch.einsum("ngqk,qngd->knd", dscores, _grouped(q, kv_heads).to(dtype))
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _grouped(x: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """``[t, heads, dim]`` as ``[t, kv_heads, heads / kv_heads, dim]``: query head h uses key head h // group."""
    return x.reshape(x.shape[0], kv_heads, x.shape[1] // kv_heads, x.shape[2])


def _weighted_values(probabilities: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.einsum("ngqk,knd->qngd", probabilities, v.to(probabilities.dtype)).flatten(1, 2)
