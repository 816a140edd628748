"""What Megatron builds in host memory, and what it builds on the device as before."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bytescale_ext.config.memory.states import StateConfig
from megatron.bytescale.core.distributed.distributed_data_parallel import move_states
from megatron.bytescale.core.distributed.host_build import BuffersInHostMemory, CopiesInHostMemory, add_hooks
from tests.bytescale.core.distributed.chunks import chunk_of

CONFIG = StateConfig(4096, math.inf, stage=3)


def buffer(size: int, dtype: torch.dtype) -> torch.Tensor:
    """Allocate as Megatron's DDP does; meta stands for a GPU."""
    return torch.zeros(size, dtype=dtype, device="meta", requires_grad=False)


def run_of(dtype: torch.dtype) -> Any:
    return SimpleNamespace(process=SimpleNamespace(on_cuda=False, dtype=dtype))


def test_buffers_begin_in_host_memory() -> None:
    with BuffersInHostMemory(pinned=False, left_out=None):
        block = buffer(6, torch.bfloat16)
        other = torch.zeros(6, device="meta")
        shaped = torch.zeros((2, 3), dtype=torch.float32, device="meta", requires_grad=False)
        ones = torch.ones(6, dtype=torch.float32, device="meta", requires_grad=False)
    assert (block.device.type, block.dtype, block.shape) == ("cpu", torch.bfloat16, (6,))
    assert not block.any()
    assert {one.device.type for one in (other, shaped, ones, buffer(6, torch.float32))} == {"meta"}


def test_buffers_of_parameters_can_be_left_out() -> None:
    with BuffersInHostMemory(pinned=False, left_out=torch.bfloat16):
        assert buffer(6, torch.bfloat16).device.type == "meta"
        assert buffer(6, torch.float32).device.type == "cpu"


def test_float32_copies_are_made_in_host_memory() -> None:
    parameter = torch.randn(4, dtype=torch.bfloat16)
    with CopiesInHostMemory():
        copy = parameter.clone().float()
        assert parameter.float().sum() == copy.sum()
        assert parameter.half().dtype is torch.float16
    assert copy.device.type == "cpu"
    assert torch.equal(copy, parameter.float())


@pytest.mark.parametrize(("stage", "moved"), [(1, set()), (2, {torch.float32}), (3, {torch.float32, torch.bfloat16})])
def test_hooks_around_the_build(stage: int, moved: set[torch.dtype]) -> None:
    """Other features add hooks before and after; none of them sees the mode once DDP is built."""
    model = SimpleNamespace(pre_wrap_hooks=[], post_wrap_hooks=[lambda chunks: chunks])
    add_hooks(model, replace(CONFIG, stage=stage), run_of(torch.bfloat16))
    chunks = [object()]
    for hook in model.pre_wrap_hooks:
        assert hook(chunks) is chunks
    built = [buffer(6, dtype) for dtype in (torch.float32, torch.bfloat16)]
    for hook in model.post_wrap_hooks:
        assert hook(chunks) is chunks
    assert {one.dtype for one in built if one.device.type == "cpu"} == moved
    assert buffer(6, torch.float32).device.type == "meta"


def test_buffers_that_began_in_host_memory_are_kept() -> None:
    chunk = chunk_of()
    buffer = chunk.buffers[0]
    for name in ("grad_data", "param_data"):
        vars(buffer)[name] = torch.zeros_like(vars(buffer)[name])
        vars(buffer)[name].began_in_host_memory = True
    sums, data = buffer.grad_data, buffer.param_data
    expected = [one.detach().clone() for one in chunk.module.parameters()]
    gradients = move_states([chunk], CONFIG, on_cuda=False)
    assert gradients is not None
    assert (buffer.grad_data is sums, buffer.param_data is data) == (True, True)
    assert all(map(torch.equal, chunk.module.parameters(), expected))
    assert all(one.untyped_storage().data_ptr() == data.data_ptr() for one in chunk.module.parameters())
