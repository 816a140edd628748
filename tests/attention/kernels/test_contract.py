"""Dtypes and empty output in the contract of kernels."""

from __future__ import annotations

import pytest
import torch

from bytescale_ext.attention.kernels.contract import accumulation_dtype, empty_output


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_sums_over_blocks_lose_nothing(dtype: torch.dtype) -> None:
    expected = torch.float64 if dtype == torch.float64 else torch.float32
    assert accumulation_dtype(dtype) == expected
    for out_dtype in (None, torch.float32):
        out, lse = empty_output(torch.ones(3, 4, 2, dtype=dtype), out_dtype)
        assert (out.shape, out.dtype) == ((3, 4, 2), out_dtype or dtype)
        assert (lse.shape, lse.dtype) == ((4, 3), expected)
        assert not out.any()
        assert torch.isneginf(lse).all()


def test_empty_outputs_are_contiguous_for_strided_queries() -> None:
    """Kernels write rows of it, and callers view it flat."""
    out, _ = empty_output(torch.ones(4, 2, 3).transpose(0, 1))
    assert out.shape == (2, 4, 3)
    assert out.is_contiguous()
