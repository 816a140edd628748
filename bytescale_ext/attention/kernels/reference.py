"""The reference kernel: attention written out in full, the oracle of all other kernels and of the ring.

It multiplies whole matrices, one document at a time, in float64 for float64 inputs and in float32 otherwise. It stores
``heads x queries x keys`` scores, so it is for tests, probes and small inputs.
"""

from __future__ import annotations

import torch

from bytescale_ext.attention.kernels.contract import Gradients, Output, Saved, accumulation_dtype, empty_output
from bytescale_ext.attention.layouts.blocks import AttentionBlock, Tile


def reference_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: AttentionBlock) -> Output:
    """Return ``out [tq, heads, dim]`` and ``lse [heads, tq]``; see ``contract.py``. Supports all devices and dtypes."""
    out, lse = empty_output(q, value_dim=v.shape[2])
    for rows, keys in block.documents():
        scores = _scores(q[rows], k[keys], block)
        document_lse = torch.logsumexp(scores, dim=-1)
        probabilities = torch.exp(scores - document_lse.unsqueeze(-1))
        out[rows] = torch.einsum("ngqk,knd->qngd", probabilities, v[keys].to(scores.dtype)).flatten(1, 2).to(q.dtype)
        lse[:, rows] = document_lse.flatten(0, 1)
    return out, lse


def reference_backward(dout: torch.Tensor, saved: Saved, block: AttentionBlock) -> Gradients:
    """Return ``dq [tq, heads, dim]`` and ``dk, dv [tk, kv_heads, dim]``; see ``contract.py``."""
    q, k, v, out, lse = saved
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for rows, keys in block.documents():
        document_saved = Saved(q[rows], k[keys], v[keys], out[rows], lse[:, rows])
        dq[rows], dk[keys], dv[keys] = _document_backward(dout[rows], document_saved, block)
    return dq, dk, dv


def _document_backward(dout: torch.Tensor, saved: Saved, block: AttentionBlock) -> Gradients:
    """Return the gradients ``dq [tq, heads, dim]`` and ``dk, dv [tk, kv_heads, dim]`` of one document.

    With ``p = exp(scores - lse)`` and ``delta = rowsum(dout * out)``, the gradients are ``dv = p^T dout``,
    ``ds = p * (dout v^T - delta) * scale``, ``dq = ds k`` and ``dk = ds^T q``. ``dout``: ``[tq, heads, dim]``.
    """
    q, k, v, out, lse = saved
    dtype, kv_heads = accumulation_dtype(q.dtype), k.shape[1]
    scores = _scores(q, k, block)
    probabilities = torch.exp(scores - lse.to(dtype).view(*scores.shape[:3], 1))
    dout = _grouped(dout, kv_heads).to(dtype)
    delta = (dout * _grouped(out, kv_heads).to(dtype)).sum(-1).permute(1, 2, 0).unsqueeze(-1)
    dv = torch.einsum("ngqk,qngd->knd", probabilities, dout)
    dprobabilities = torch.einsum("qngd,knd->ngqk", dout, v.to(dtype))
    dscores = probabilities * (dprobabilities - delta) * block.scale
    dq = torch.einsum("ngqk,knd->qngd", dscores, k.to(dtype)).flatten(1, 2)
    dk = torch.einsum("ngqk,qngd->knd", dscores, _grouped(q, kv_heads).to(dtype))
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _scores(q: torch.Tensor, k: torch.Tensor, block: AttentionBlock) -> torch.Tensor:
    """Return the scaled scores of one document, minus infinity if the query does not see the key.

    ``q``: ``[tq, heads, dim]``; ``k``: ``[tk, kv_heads, dim]``. The result is ``[kv_heads, heads / kv_heads, tq, tk]``
    in the accumulation dtype.
    """
    dtype = accumulation_dtype(q.dtype)
    scores = torch.einsum("qngd,knd->ngqk", _grouped(q, k.shape[1]).to(dtype), k.to(dtype)) * block.scale
    if block.causal:
        num_q, num_k = scores.shape[-2:]
        window = num_k if block.window is None else block.window
        unseen = Tile(slice(0, num_q), slice(0, num_k), window).hidden(q.device)
        scores = scores.masked_fill(unseen, -torch.inf)
    return scores


def _grouped(x: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Reshape ``[t, heads, dim]`` to ``[t, kv_heads, group, dim]``: query head h uses key head h // group."""
    return x.reshape(x.shape[0], kv_heads, x.shape[1] // kv_heads, x.shape[2])
