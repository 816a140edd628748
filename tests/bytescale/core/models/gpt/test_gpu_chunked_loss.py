"""The sum of weight gradients of the chunked loss on a GPU."""

from __future__ import annotations

import pytest
import torch

from megatron.bytescale.core.models.gpt.chunked_loss import WeightGradient
from tests.bytescale.core.models.gpt.errors import relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_the_sum_on_a_gpu_is_in_float32() -> None:
    weight = torch.zeros(48, 32, device="cuda", dtype=torch.bfloat16)
    total = WeightGradient.of(weight)
    grads = torch.randn(96, 2, 48, device="cuda", dtype=torch.bfloat16)
    hidden = torch.randn(96, 2, 32, device="cuda", dtype=torch.bfloat16)
    for part, other in zip(grads.split(8), hidden.split(8), strict=True):
        total.add(part, other)
    exact = grads.double().flatten(0, 1).T @ hidden.double().flatten(0, 1)
    assert relative_error(total.total, exact) < 1e-5
