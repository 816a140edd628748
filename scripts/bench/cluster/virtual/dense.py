"""An attention kernel for recordings: many documents of a block in one masked matrix.

A recording has many short documents. The CPU kernels compute them one by one, which takes minutes for a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import torch

from bytescale_ext.attention.kernels.contract import Gradients, Output, Saved
from bytescale_ext.attention.layouts.blocks import AttentionBlock
from bytescale_ext.attention.layouts.rows import CuSeqlens

ROWS: Final = 256
"""Most queries of several documents in one matrix."""


def dense_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: AttentionBlock) -> Output:
    """Return ``out [tq, heads, dim]`` and ``lse [heads, tq]``; see ``kernels/contract.py``."""
    outs, lses = [], []
    for rows, keys, run in _runs(block):
        scores = _scores(q[rows], k[keys], run)
        lse = torch.logsumexp(scores, dim=-1)
        out = torch.einsum("ngqk,knd->qngd", torch.exp(scores - lse.unsqueeze(-1)), v[keys])
        outs.append(out.flatten(1, 2))
        lses.append(lse.flatten(0, 1))
    return torch.cat(outs), torch.cat(lses, dim=1)


def dense_backward(dout: torch.Tensor, saved: Saved, block: AttentionBlock) -> Gradients:
    """Return ``dq [tq, heads, dim]`` and ``dk, dv [tk, kv_heads, dim]``; see ``kernels/contract.py``."""
    parts = []
    for rows, keys, run in _runs(block):
        k, v, lse = saved.k[keys], saved.v[keys], saved.lse[:, rows]
        scores = _scores(saved.q[rows], k, run)
        probabilities = torch.exp(scores - lse.reshape(*scores.shape[:3], 1))
        queries, outputs, gradients = (_grouped(one[rows], k.shape[1]) for one in (saved.q, saved.out, dout))
        delta = (gradients * outputs).sum(-1).permute(1, 2, 0).unsqueeze(-1)
        dscores = probabilities * (torch.einsum("qngd,knd->ngqk", gradients, v) - delta) * run.scale
        dq = torch.einsum("ngqk,knd->qngd", dscores, k).flatten(1, 2)
        dk, dv = (torch.einsum("ngqk,qngd->knd", *two) for two in ((dscores, queries), (probabilities, gradients)))
        parts.append((dq, dk, dv))
    dq, dk, dv = map(torch.cat, zip(*parts, strict=True))
    return dq, dk, dv


def _runs(block: AttentionBlock) -> Iterator[tuple[slice, slice, AttentionBlock]]:
    """Yield the query rows, the key rows and the block of consecutive documents, of ``ROWS`` rows if they are short."""
    first, ends = 0, block.cu_q.offsets
    while first < block.num_documents:
        last = first + 1
        while last < block.num_documents and ends[last + 1] - ends[first] <= ROWS:
            last += 1
        cu_q, cu_k = (CuSeqlens.of_lengths(one.lengths[first:last]) for one in (block.cu_q, block.cu_k))
        rows, keys = (slice(one.offsets[first], one.offsets[last]) for one in (block.cu_q, block.cu_k))
        yield rows, keys, replace(block, cu_q=cu_q, cu_k=cu_k)
        first = last


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
