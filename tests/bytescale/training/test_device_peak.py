"""The memory of a training step equals the forecast: model states and activations.

Live bytes are counted once per tensor storage, on CPU. Torch's LayerNorm on CPU saves only its input, like fused
kernels on a GPU. A fused SwiGLU replaces Megatron's, which is compiled on a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bytescale_ext.plan.activation.forecast import forecast
from bytescale_ext.plan.activation.load import LayerSettings, Machine, cost_of_rates, layer_load
from bytescale_ext.plan.activation.plan import ActivationPlan
from bytescale_ext.plan.activation.policies import make_plan
from bytescale_ext.plan.cost.model_shape import ModelShape
from bytescale_ext.plan.memory.model_states import state_bytes
from tests.harness import run_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.full]

SHAPE = ModelShape(5, 256, 8, 4, 32, 688, True, 256)
LENGTH = 701
SHORTER, OF_SHORTER = 384, ("none", "memo", "priced")  # some plans at another length
LOSS_TOKENS = 64
FLOAT_BYTES = 4
ROWS = 32  # rows that the fused activation function processes together

PLANS = {
    "none": ActivationPlan("none"),
    "keep-attention": ActivationPlan("shares", 0.0, 1.0, 0.0),
    "swap-only": ActivationPlan("shares", 1.0, 0.0, 1.0),
    "memo": ActivationPlan("memo", 0.5, 0.5, 1.0, False, 2),
    "memo-0": ActivationPlan("memo", 0.0, 1.0, 1.0, False, 2),
    "memo-1": ActivationPlan("memo", 1.0, 0.0, 1.0, False, 2),
    "priced": ActivationPlan("priced", 0.5, 0.5, 1.0, True, 2),
    "priced-three-shares": ActivationPlan("priced", 0.25, 0.25, 0.5, True, 3),
    "offload": ActivationPlan("offload", 0.5, 0.0, 0.5, False, 2),
}


class FusedSwiglu(torch.autograd.Function):
    """SwiGLU [..., 2 f] -> [..., f] that saves only its input, and needs memory only for its results."""

    @staticmethod
    def forward(ctx: Any, both: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(both)
        out = both.new_empty(*both.shape[:-1], both.shape[-1] // 2)
        for rows, result in zip(both.split(ROWS), out.split(ROWS), strict=True):
            gate, up = rows.chunk(2, -1)
            result.copy_(torch.nn.functional.silu(gate) * up)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (both,) = ctx.saved_tensors
        out = torch.empty_like(both)
        for rows, given, result in zip(both.split(ROWS), gradient.split(ROWS), out.split(ROWS), strict=True):
            gate, up = rows.chunk(2, -1)
            for_gate, for_up = result.chunk(2, -1)
            for_up.copy_(torch.nn.functional.silu(gate) * given)
            for_gate.copy_(torch.ops.aten.silu_backward(given * up, gate))
        return out


def load_of(length: int) -> Any:
    cost = cost_of_rates(SHAPE, 1e12, 1e12, 1e12)
    return layer_load(cost, length, LayerSettings(element_bytes=FLOAT_BYTES, loss_tokens=LOSS_TOKENS))


def chosen_plans(length: int) -> dict[str, ActivationPlan]:
    """Return the plans of the policies for a machine with half the memory that the activations need."""
    load = load_of(length)
    whole = forecast(ActivationPlan("none"), load, Machine(0.0, 0.0)).device_bytes
    machine = Machine(0.5 * whole, 0.6 * whole, 1e9)
    return {f"chosen by {policy}": make_plan(policy, load, machine) for policy in ("memo", "priced", "offload", "auto")}


def build_fused(shape: ModelShape) -> Any:
    """Build a model on CPU with norms and SwiGLU that save only their inputs, like fused GPU kernels."""
    from megatron.core.transformer import mlp

    from megatron.bytescale.training import one_device

    configure = one_device._configuration

    def configuration(*args: Any) -> Any:
        config = configure(*args)
        config.normalization, config.bias_activation_fusion = "LayerNorm", True
        return config

    one_device._configuration = configuration
    mlp.bias_swiglu_impl = lambda both, bias, *rest: FusedSwiglu.apply(both)
    built = one_device.build_model(shape, torch.float32, 1 << 28, LOSS_TOKENS, on_cpu=True)
    built.weights.clear()
    return built


def measure(rank: int, world: int) -> list[tuple[str, int, float, int]]:
    """Return (plan, length, predicted bytes, peak live bytes) of steps with Adam. The first step creates its states."""
    from bytescale_ext.activation.trace import AllocationTrace
    from bytescale_ext.plan.memory.placement import liveness_bound

    built = build_fused(SHAPE)
    parameters = list(built.model.parameters())
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    adam = torch.optim.Adam(parameters, lr=1e-4, fused=True)
    adam.step()
    moments = [value for state in adam.state.values() for value in state.values()]
    states = [*parameters, *[parameter.grad for parameter in parameters], *moments]
    held = sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in states}.values())
    found = []
    shorter = {name: PLANS[name] for name in OF_SHORTER}
    for length, plans in ((LENGTH, {**PLANS, **chosen_plans(LENGTH)}), (SHORTER, shorter)):
        for name, plan in plans.items():
            built.store.plan = plan
            tokens = built.batch(length, 0)
            with AllocationTrace([*states, built.store.link.arena.memory]) as trace:
                built.loss(tokens).backward()
                adam.step()
                built.model.zero_grad(set_to_none=False)
            built.store.check_empty()
            predicted = forecast(plan, load_of(length), Machine(1e12, 1e12)).device_bytes
            live = held + liveness_bound(trace.requests())
            found.append((name, length, state_bytes(SHAPE, FLOAT_BYTES) + predicted, live))
    return found


@pytest.fixture(scope="module")
def measured() -> list[tuple[str, int, float, int]]:
    return list(run_ranks(measure, 1, init_group=False)[0])


def test_the_peak_is_within_five_percent_of_the_prediction(measured: list[tuple[str, int, float, int]]) -> None:
    """Totals agree, and activations alone: model states are known to the byte, except biases of norms."""
    assert len(measured) == len(PLANS) + 4 + len(OF_SHORTER)
    states = state_bytes(SHAPE, FLOAT_BYTES)
    for name, length, predicted, live in measured:
        assert predicted == pytest.approx(live, rel=0.05), (name, length)
        assert predicted - states == pytest.approx(live - states, rel=0.05), (name, length)


def test_a_policy_takes_less_than_none(measured: list[tuple[str, int, float, int]]) -> None:
    live = {(name, length): bytes_ for name, length, _, bytes_ in measured}
    assert all(live[name, LENGTH] < 0.93 * live["none", LENGTH] for name in PLANS if name != "none")
    assert all(live[name, SHORTER] < 0.93 * live["none", SHORTER] for name in OF_SHORTER[1:])
