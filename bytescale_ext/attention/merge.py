"""Join attention over disjoint sets of keys (online softmax).

Two blocks of keys give ``(out_a, lse_a)`` and ``(out_b, lse_b)`` for the same queries. Over both::

    lse = log(exp(lse_a) + exp(lse_b))
    out = exp(lse_a - lse) * out_a + exp(lse_b - lse) * out_b

A query without keys has ``lse`` minus infinity, weight 0, and any finite ``out``.
"""

from __future__ import annotations

import torch


def merge_(total_out: torch.Tensor, total_lse: torch.Tensor, block_out: torch.Tensor, block_lse: torch.Tensor) -> None:
    """Add one block of keys to running totals, in place.

    Args:
        total_out: ``[queries, heads, dim]``, float32 or float64; may be a view.
        total_lse: ``[heads, queries]``, the same dtype; may be a view.
        block_out: ``[queries, heads, dim]``, any floating dtype.
        block_lse: ``[heads, queries]``, the dtype of ``total_lse``.
    """
    merged = torch.logaddexp(total_lse, block_lse)
    # Minus infinity minus itself is nan: a query without keys on both sides keeps its output with weight 1.
    empty = torch.isneginf(merged)
    keep = torch.exp(total_lse - merged).masked_fill_(empty, 1.0)
    take = torch.exp(block_lse - merged).masked_fill_(empty, 0.0)
    total_out.mul_(_per_row(keep)).addcmul_(block_out, _per_row(take))
    total_lse.copy_(merged)


def _per_row(weight: torch.Tensor) -> torch.Tensor:
    """View ``[heads, queries]`` as ``[queries, heads, 1]``."""
    return weight.transpose(0, 1).unsqueeze(-1)
