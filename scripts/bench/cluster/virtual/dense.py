"""An attention kernel for recordings: all documents of a block in one masked matrix.

A recording has many short documents. The CPU kernels compute them one by one, which takes minutes for a step.
"""

from __future__ import annotations

import torch

from bytescale_ext.attention.kernels.contract import Gradients, Output, Saved
from bytescale_ext.attention.layouts.blocks import AttentionBlock


def dense_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: AttentionBlock) -> Output:
    """Return ``out [tq, heads, dim]`` and ``lse [heads, tq]``; see ``kernels/contract.py``."""
    scores = _scores(q, k, block)
    lse = torch.logsumexp(scores, dim=-1)
    out = torch.einsum("ngqk,knd->qngd", torch.exp(scores - lse.unsqueeze(-1)), v)
    return out.flatten(1, 2), lse.flatten(0, 1)


def dense_backward(dout: torch.Tensor, saved: Saved, block: AttentionBlock) -> Gradients:
    """Return ``dq [tq, heads, dim]`` and ``dk, dv [tk, kv_heads, dim]``; see ``kernels/contract.py``."""
    q, k, v, out, lse = saved
    scores = _scores(q, k, block)
    probabilities = torch.exp(scores - lse.view(*scores.shape[:3], 1))
    queries, outputs, gradients = (_grouped(one, k.shape[1]) for one in (q, out, dout))
    delta = (gradients * outputs).sum(-1).permute(1, 2, 0).unsqueeze(-1)
    dscores = probabilities * (torch.einsum("qngd,knd->ngqk", gradients, v) - delta) * block.scale
    dq = torch.einsum("ngqk,knd->qngd", dscores, k).flatten(1, 2)
    dk = torch.einsum("ngqk,qngd->knd", dscores, queries)
    return dq, dk, torch.einsum("ngqk,qngd->knd", probabilities, gradients)


def _scores(q: torch.Tensor, k: torch.Tensor, block: AttentionBlock) -> torch.Tensor:
    """Return the scaled scores ``[kv_heads, heads / kv_heads, tq, tk]``, minus infinity if a query sees not the key."""
    documents = torch.arange(block.num_documents)
    of_queries = documents.repeat_interleave(torch.tensor(block.cu_q.lengths))
    of_keys = documents.repeat_interleave(torch.tensor(block.cu_k.lengths))
    unseen = of_queries[:, None] != of_keys[None]
    if block.causal:  # queries and keys are the same rows
        unseen |= torch.ones(len(q), len(k), dtype=torch.bool).triu(1)
    scores = torch.einsum("qngd,knd->ngqk", _grouped(q, k.shape[1]), k) * block.scale
    return scores.masked_fill(unseen, -torch.inf)


def _grouped(x: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Reshape ``[t, heads, dim]`` to ``[t, kv_heads, heads / kv_heads, dim]``."""
    return x.reshape(x.shape[0], kv_heads, -1, x.shape[2])
