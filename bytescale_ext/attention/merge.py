"""Joining of attention over disjoint sets of keys (online softmax).

Two blocks of keys give ``(out_a, lse_a)`` and ``(out_b, lse_b)`` for the same queries. Over both::

    lse = log(exp(lse_a) + exp(lse_b))
    out = exp(lse_a - lse) * out_a + exp(lse_b - lse) * out_b

A query without keys has ``lse`` minus infinity, weight 0, and any finite ``out``.

``join_`` joins a block to some rows of the totals with torch's operators, on any device. ``fused_merge.py`` does the
same in one kernel on CUDA, if ``choose_join`` finds that it runs and is correct.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from bytescale_ext.attention.kernels.contract import Output, accumulation_dtype
from bytescale_ext.attention.kernels.probes import failure, why_not_triton
from bytescale_ext.attention.layouts.rows import Rows

JoinFunction = Callable[[Output, Output, Rows], None]
JOIN_TOLERANCE = 1e-5
"""Tolerance of the fused kernel against torch. Both sum in the accumulation dtype, but in different orders."""


def merge_(total_out: torch.Tensor, total_lse: torch.Tensor, block_out: torch.Tensor, block_lse: torch.Tensor) -> None:
    """Join one block of keys to running totals, in place.

    Args:
        total_out: ``[queries, heads, dim]``, float32 or float64; may be a view.
        total_lse: ``[heads, queries]``, the same dtype; may be a view.
        block_out: ``[queries, heads, dim]``, any floating dtype.
        block_lse: ``[heads, queries]``, the dtype of ``total_lse``.
    """
    merged = torch.logaddexp(total_lse, block_lse)
    # Minus infinity minus itself is nan. A query without keys on both sides keeps its output with weight 1.
    empty = torch.isneginf(merged)
    keep = torch.exp(total_lse - merged).masked_fill_(empty, 1.0)
    take = torch.exp(block_lse - merged).masked_fill_(empty, 0.0)
    total_out.mul_(_per_row(keep)).addcmul_(block_out, _per_row(take))
    total_lse.copy_(merged)


def _per_row(weight: torch.Tensor) -> torch.Tensor:
    """View ``[heads, queries]`` as ``[queries, heads, 1]``."""
    return weight.transpose(0, 1).unsqueeze(-1)


def join_(totals: Output, part: Output, rows: Rows) -> None:
    """Join one block of keys to some rows of running totals, in place.

    Args:
        totals: ``out [t, heads, dim]`` of any floating dtype and ``lse [heads, t]`` in the accumulation dtype.
        part: results of the block, ``out [queries, heads, dim]`` of any floating dtype and ``lse [heads, queries]``.
        rows: rows of the block's queries among the ``t`` rows.
    """
    out, lse = totals
    total_out, total_lse = rows.take(out), rows.take(lse, dim=1)
    precise = total_out.to(lse.dtype)  # the same tensor in a ring pass, whose totals have the accumulation dtype
    merge_(precise, total_lse, *part)
    if not rows.is_view or precise is not total_out:
        rows.put_(out, precise)
    if not rows.is_view:
        rows.put_(lse, total_lse, dim=1)


class JoinChoice(NamedTuple):
    """The function that joins blocks, and the reason against the fused kernel; None if the fused kernel is used."""

    join: JoinFunction
    why_not_fused: str | None


def choose_join(device: torch.device, dtype: torch.dtype, head_dim: int) -> JoinChoice:
    """Return the fused kernel if it runs and passes a probe, else torch's operators. No communication.

    ``dtype`` and ``head_dim`` describe the queries.
    """
    why_not = why_not_triton(device)
    if why_not is not None:
        return JoinChoice(join_, why_not)
    from bytescale_ext.attention.fused_merge import fused_join_

    why_not = probe_join(fused_join_, device, dtype, head_dim)
    return JoinChoice(join_ if why_not else fused_join_, why_not)


def probe_join(join: JoinFunction, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Join small blocks and compare the results with torch's operators. Return why ``join`` is unfit, or None.

    The probe has totals in the accumulation dtype, as in ring passes, and in ``dtype``, as for documents in slices. It
    has rows in one interval and in several intervals. Some queries have no keys in the totals, in the block or in both.
    """
    generator = torch.Generator().manual_seed(0)
    precise = accumulation_dtype(dtype)

    def values(num_rows: int, out_dtype: torch.dtype) -> Output:
        lse = torch.randn(3, num_rows, generator=generator, dtype=torch.float64) * 5
        lse[lse.abs() < 2] = -torch.inf
        out = torch.randn(num_rows, 3, head_dim, generator=generator, dtype=torch.float64)
        return out.to(device, out_dtype), lse.to(device, precise)

    for rows in (Rows.of([(5, 38)]), Rows.of([(0, 9), (12, 13), (30, 40)])):
        for totals_dtype in (precise, dtype):
            totals, part = values(41, totals_dtype), values(rows.num_rows, dtype)
            expected = totals[0].clone(), totals[1].clone()
            join_(expected, part, rows)
            try:
                join(totals, part, rows)
            except Exception as error:
                return failure(error)
            tolerance = JOIN_TOLERANCE if totals_dtype == precise else 2 * torch.finfo(totals_dtype).eps
            if not all(torch.allclose(a, b, tolerance, tolerance) for a, b in zip(totals, expected, strict=True)):
                return "its probe differs from torch"
    return None
