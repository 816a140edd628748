"""Megatron's gradient buffers in host memory equal the sums of its hook. tests/e2e/states tests whole runs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from megatron.core.optimizer.optimizer import FP32Optimizer

from bytescale_ext.config.memory.states import StateConfig
from bytescale_ext.plan.states.pages import NUM_GRADIENT_SLOTS
from bytescale_ext.states.node_memory import HostBlocks, NodeRanks
from megatron.bytescale.core.distributed.param_and_grad_buffer import (
    HostBucketGroup,
    HostBuffer,
    HostGradients,
    taking_gradients,
)
from megatron.bytescale.registry import specialize
from tests.bytescale.core.distributed.chunks import chunk_of

CONFIG = StateConfig(4096, math.inf, stage=2)
PRIVATE = HostBlocks(shares=False, on_cuda=False)
SLOT_BYTES = NUM_GRADIENT_SLOTS * 4096
TOKENS = torch.tensor([1, 5, 5])


def parameters_of(chunk: Any) -> list[Any]:
    return list(chunk.module.parameters())


def with_gradients(passes: int = 3, **settings: Any) -> tuple[Any, HostGradients, list[torch.Tensor]]:
    """Return a chunk after some passes, its gradients, and the sums of Megatron's hook."""
    chunk, plain = chunk_of(**settings), chunk_of(**settings)
    gradients = HostGradients([chunk], CONFIG, PRIVATE, on_cuda=False)
    sums = [torch.zeros(one.shape) for one in parameters_of(plain)]
    for _ in range(passes):
        for one in (chunk, plain):
            one.module(TOKENS).backward()
        for total, parameter in zip(sums, parameters_of(plain), strict=True):
            total.add_(parameter.grad)
            parameter.grad = None
    return chunk, gradients, sums


def test_gradients_go_to_host_memory_as_megatron_adds_them() -> None:
    chunk, gradients, sums = with_gradients()
    gradients.sums.finish()
    buffer = chunk.buffers[0]
    whole = buffer.grad_data.untyped_storage().data_ptr()
    for parameter, total in zip(parameters_of(chunk), sums, strict=True):
        assert parameter.grad is None  # so Megatron's hook adds nothing
        assert torch.equal(parameter.main_grad, total)
        assert parameter.main_grad.untyped_storage().data_ptr() == whole
    in_buckets = torch.cat([bucket.grad_data for bucket in buffer.buckets])
    assert torch.equal(in_buckets, buffer.grad_data)
    assert gradients.host_bytes == SLOT_BYTES + 4 * buffer.numel


def test_what_a_layer_has_added_by_itself_is_not_added_again() -> None:
    chunk = chunk_of()
    gradients = HostGradients([chunk], CONFIG, PRIVATE, on_cuda=False)
    chunk.module.embedding.grad_added_to_main_grad = True
    chunk.module(TOKENS).backward()
    gradients.sums.finish()
    assert not chunk.module.embedding.main_grad.any()
    assert chunk.module.embedding.grad is None
    assert all(one.main_grad.any() for one in parameters_of(chunk)[1:])


def test_the_gradient_of_an_embedding_joins_what_a_layer_has_added_for_its_use_as_output_weight() -> None:
    """Megatron marks such weights; tests/reference has pipelines with them."""
    chunk = chunk_of()
    gradients = HostGradients([chunk], CONFIG, PRIVATE, on_cuda=False)
    embedding = chunk.module.embedding
    embedding.grad_added_to_main_grad = embedding.zero_out_wgrad = True
    embedding.main_grad.fill_(2.0)
    chunk.module(TOKENS).backward()
    gradients.sums.finish()
    assert embedding.main_grad[TOKENS].ne(2.0).any()
    assert embedding.main_grad[0].eq(2.0).all()


def test_reduced_gradients_are_scaled_and_lent_where_megatron_sums_them_again() -> None:
    chunk, _, sums = with_gradients(factor=0.5)
    group, buffer = chunk.bucket_groups[0], chunk.buffers[0]
    assert (type(group), type(buffer)) == (HostBucketGroup, HostBuffer)
    group.finish_grad_sync()
    assert not group.param_gather_dispatched
    for parameter, total in zip(parameters_of(chunk), sums, strict=True):
        assert torch.equal(parameter.main_grad, 0.5 * total)
        is_lent = parameter.main_grad.untyped_storage().data_ptr() != buffer.grad_data.untyped_storage().data_ptr()
        assert is_lent == (parameter.ndim == 1 or parameter is chunk.module.embedding)
    chunk.module.embedding.main_grad.add_(1.0)  # the sum over another group
    buffer.scale_gradients(3.0)
    assert torch.equal(chunk.module.embedding.main_grad, (0.5 * sums[0] + 1.0) * 3.0)
    for parameter, total in zip(parameters_of(chunk)[1:], sums[1:], strict=True):
        assert torch.equal(parameter.main_grad, 0.5 * total * 3.0)
        assert parameter.main_grad.untyped_storage().data_ptr() == buffer.grad_data.untyped_storage().data_ptr()


@dataclass(frozen=True)
class SharedBy:
    """Memory without bytes that a node shares."""

    node: NodeRanks


class OnDevice(torch.Tensor):
    """A tensor that works only with others on its device, as on a GPU; it can be copied to host memory."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See torch.Tensor."""
        if func is not torch.Tensor.to:
            raise RuntimeError("Expected all tensors to be on the same device")
        return args[0].as_subclass(torch.Tensor) if args[1] == torch.device("cpu") else args[0]


def test_gradients_are_scaled_by_a_scalar_on_the_device() -> None:
    """Megatron divides by the number of tokens, which it has summed on the device."""
    chunk, gradients, sums = with_gradients()
    gradients.sums.finish()
    chunk.buffers[0].scale_gradients(torch.tensor(0.25).as_subclass(OnDevice))
    assert torch.equal(chunk.module.embedding.main_grad, 0.25 * sums[0])


def optimizer_of(gradients: HostGradients, *values: torch.Tensor) -> Any:
    """Return Megatron's optimizer of float32 parameters with these gradients."""
    part = object.__new__(FP32Optimizer)
    specialize(part, taking_gradients)
    part.host_gradients = gradients
    parameters = [torch.nn.Parameter(torch.zeros_like(value)) for value in values]
    for parameter, value in zip(parameters, values, strict=True):
        parameter.grad = value
    part.optimizer = torch.optim.AdamW(parameters) if parameters else None
    vars(part).update(is_stub_optimizer=not parameters, get_parameters=lambda: parameters)
    part._filter_grads_for_norm = lambda of, param_filter: [one.grad for one in of]
    return part


def test_norms_of_host_gradients_are_given_to_megatrons_kernels() -> None:
    """A kernel of TransformerEngine or Apex reads device memory only; norms of norms are the norm of all."""
    gradients = HostGradients([chunk_of()], CONFIG, PRIVATE, on_cuda=False)
    values = [torch.randn(5, 3), torch.randn(7), torch.zeros(2)]
    norms = optimizer_of(gradients, *values).get_grads_for_grad_norm()
    assert [norm.shape for norm in norms] == [(1,)] * 3
    assert torch.equal(torch.cat(norms), torch.stack([value.norm() for value in values]))
    gradients.device = torch.device("meta")
    assert {norm.device.type for norm in optimizer_of(gradients, *values).get_grads_for_grad_norm()} == {"meta"}
    assert optimizer_of(gradients).get_grads_for_grad_norm() == []


def test_an_optimizer_takes_lent_gradients_back() -> None:
    chunk, gradients, sums = with_gradients(shares=False)
    part = object.__new__(FP32Optimizer)
    specialize(part, taking_gradients)
    part.host_gradients = gradients
    parameters = [one.float().detach().requires_grad_() for one in parameters_of(chunk)]
    part.optimizer = torch.optim.AdamW(parameters)
    chunk.bucket_groups[0].finish_grad_sync()
    chunk.module.embedding.main_grad.add_(1.0)
    vars(part).update(config=type("Config", (), {"timers": None}), is_stub_optimizer=False, grad_scaler=None)
    for parameter, model in zip(parameters, parameters_of(chunk), strict=True):
        parameter.main_grad = gradients._later.get(model, model.main_grad)  # type: ignore[attr-defined]
    part.prepare_grads()
    assert parameters[0].grad is not None
    assert torch.equal(parameters[0].grad, sums[0] + 1.0)
    assert not gradients._lent


@pytest.mark.parametrize("is_reversed", [False, True])
def test_ranks_meet_in_the_order_of_the_buffers(is_reversed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are lent in the order of a set, which differs between ranks."""
    chunk, gradients, _ = with_gradients()
    first, second = (NodeRanks(object(), torch.device("cpu"), (rank,)) for rank in range(2))  # type: ignore[arg-type]
    parameters = parameters_of(chunk)[:3]
    gradients._shared = dict(zip(parameters, map(SharedBy, (first, second, second)), strict=True))  # type: ignore[arg-type]
    lent = parameters[::-1] if is_reversed else parameters
    gradients._later = {one: torch.zeros(1) for one in lent}
    gradients._lent = {one: torch.zeros(1) for one in lent}
    met: list[NodeRanks] = []
    monkeypatch.setattr(NodeRanks, "barrier", lambda node: met.append(node))
    gradients.take_back()
    assert met == [first, second]


def test_float32_parameters_of_a_gpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bytescale_ext.activation.arena.pin", lambda memory: None)
    monkeypatch.setattr("bytescale_ext.states.gradients.make_link", lambda arena, on_cuda: None)
    with pytest.raises(ValueError, match="parameters are float32: add --bf16, or use --state-stage 1 or 3"):
        HostGradients([chunk_of(torch.float32)], CONFIG, PRIVATE, on_cuda=True)
