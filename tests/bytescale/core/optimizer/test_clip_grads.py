"""Clipping of gradients in host memory, which Megatron's function refuses on a GPU."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bytescale_ext.config.memory.states import StateConfig
from megatron.bytescale.core.distributed.host_build import CopiesInHostMemory
from megatron.bytescale.core.optimizer.clip_grads import wrap_clip_grad_by_total_norm_fp32


def clip(stage: int | None, total_norm: float | torch.Tensor) -> list[torch.Tensor]:
    """Return gradients of norm 5 after clipping to 1 in a run of some stage; None: resident states."""

    def refuse(*_: object) -> None:
        raise AssertionError("torch.cuda.FloatTensor")

    config = None if stage is None else StateConfig(4096, math.inf, stage=stage)
    runtime: Any = SimpleNamespace(run=SimpleNamespace(find=lambda kind: config))
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(3)]
    parameters[0].grad, parameters[2].grad = torch.tensor([0.0, 3.0]), torch.tensor([4.0, 0.0])
    wrap_clip_grad_by_total_norm_fp32(refuse, runtime)(parameters, 1.0, total_norm)
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("norm", [5.0, torch.tensor([5.0])], ids=["number", "tensor of TransformerEngine"])
def test_gradients_are_clipped_in_host_memory(stage: int, norm: float | torch.Tensor) -> None:
    share = 1.0 / (5.0 + 1e-6)
    assert torch.equal(torch.stack(clip(stage, norm)), torch.tensor([[0.0, 3.0], [4.0, 0.0]]) * share)
    assert torch.equal(torch.stack(clip(stage, 0.5 * norm / norm)), torch.tensor([[0.0, 3.0], [4.0, 0.0]]))


@pytest.mark.parametrize("stage", [None, 1])
def test_megatron_clips_gradients_on_the_device(stage: int | None) -> None:
    with pytest.raises(AssertionError, match="FloatTensor"):
        clip(stage, 5.0)


def test_an_optimizer_is_built_over_parameters_in_host_memory() -> None:
    """Megatron's optimizers accept three types, by name."""
    names = {torch.float32: "torch.cuda.FloatTensor", torch.bfloat16: "torch.cuda.BFloat16Tensor"}
    for dtype, name in names.items():
        parameter = torch.nn.Parameter(torch.zeros(2, dtype=dtype))
        with CopiesInHostMemory():
            assert parameter.type() == name
            assert parameter.type(torch.float64).dtype is torch.float64
        assert parameter.type() == name.replace("cuda.", "")
