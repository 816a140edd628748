"""Outputs of attention to join, and their comparison with torch's operators."""

from __future__ import annotations

import torch

from bytescale_ext.attention.kernels.contract import Output, accumulation_dtype
from bytescale_ext.attention.layouts.rows import Rows
from bytescale_ext.attention.merge import JoinFunction, join_


def outputs(num_rows: int, dtype: torch.dtype, dim: int, seed: int) -> Output:
    """Return an output and its sums, some of them over no keys."""
    generator = torch.Generator().manual_seed(seed)
    lse = torch.randn(3, num_rows, generator=generator, dtype=torch.float64) * 20
    lse[lse > 30] = -torch.inf
    out = torch.randn(num_rows, 3, dim, generator=generator, dtype=torch.float64)
    return out.to(dtype), lse.to(accumulation_dtype(dtype))


def assert_joins(join: JoinFunction, totals: Output, part: Output, rows: Rows) -> None:
    """Compare with torch's operators; rows that are not joined must not change."""
    wanted = totals[0].clone(), totals[1].clone()
    join_(wanted, part, rows)
    join(totals, part, rows)
    for got, expected in zip(totals, wanted, strict=True):
        # Torch's weights have the rounding error of sums as large as 60.
        tolerance = max(4 * torch.finfo(got.dtype).eps, 100 * torch.finfo(wanted[1].dtype).eps)
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    others = sorted(set(range(len(totals[0]))) - {row for interval in rows.intervals for row in range(*interval)})
    assert torch.equal(totals[0][others], wanted[0][others])
    assert torch.equal(totals[1][:, others], wanted[1][:, others])
