"""The fused kernel that joins blocks, compiled for the GPU."""

from __future__ import annotations

import os

import pytest
import torch

from bytescale_ext.attention.layouts.rows import Rows
from bytescale_ext.attention.merge import choose_join
from tests.attention.joins import assert_joins, outputs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif("GHOST_DEVICES" in os.environ, reason="a ghost GPU cannot run kernels of Triton"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu(dtype: torch.dtype) -> None:
    """The compiled kernel is chosen, and joins 9 M values with offsets beyond 32 bits like torch."""
    join, why_not = choose_join(torch.device("cuda"), dtype, 128)
    assert why_not is None
    rows = Rows.of([(5, 8000), (700_000, 716_000)])
    part = tuple(x.cuda() for x in outputs(rows.num_rows, dtype, 128, 1))
    out = torch.randn(716_001, 24, 128, device="cuda")[:, ::8]  # 3 of 24 heads, so rows are 3,072 values apart
    lse = torch.randn(3, 716_001, device="cuda")
    assert_joins(join, (out, lse), part, rows)  # type: ignore[arg-type]
