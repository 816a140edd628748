"""The memory of a step with experts equals the forecast for the loads that occurred.

Two ranks share the experts, so the router decides the number of tokens of each rank's experts.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from bytescale_ext.activation.trace import AllocationTrace
from bytescale_ext.plan.activation.forecast import forecast
from bytescale_ext.plan.activation.load import LayerSettings, Machine, cost_of_rates, layer_load
from bytescale_ext.plan.activation.operators import FUSED, LayerOperators
from bytescale_ext.plan.activation.plan import ActivationPlan
from bytescale_ext.plan.cost.model_shape import ModelShape
from bytescale_ext.plan.memory.placement import liveness_bound
from tests.bytescale.training.test_device_peak import FLOAT_BYTES, LOSS_TOKENS, build_fused
from tests.harness import run_ranks

pytestmark = pytest.mark.ranks

CHOSEN, EXPERTS, WIDTH = 2, 4, 320
SHAPE = ModelShape(4, 256, 8, 4, 32, 688, True, 256, 4, CHOSEN * WIDTH, EXPERTS, CHOSEN)
LATENT = replace(SHAPE, expert_latent=128)
TOLERANCES = {0: 0.05, 128: 0.06}  # the bytes that a forecast has too many are a larger part of fewer bytes
LENGTH = 512
PLANS = {
    "none": ActivationPlan("none"),
    "swap": ActivationPlan("shares", 1.0, 0.0, 1.0),
    "priced": ActivationPlan("priced", 0.3, 0.3, 1.0, True, 2),
}


OPERATORS = {
    "fused": FUSED,
    "split": LayerOperators(split_norms=True, split_activation=True, angles=SHAPE.head_dim, split_angles=True),
}


SHAPES = {"fused": SHAPE, "split": SHAPE, "fused, latents": LATENT, "split, latents": LATENT}


def with_experts(latent: int) -> None:
    """Build the layers of ``build_fused`` with experts, of ``latent`` numbers unless it is 0."""
    from megatron.core.models.gpt import gpt_layer_specs

    from megatron.bytescale.core.transformer.moe.latent_layer import LatentMoELayer
    from megatron.bytescale.training import one_device

    configure, spec = one_device._configuration, gpt_layer_specs.get_gpt_layer_local_spec

    def configuration(*args: Any) -> Any:
        config = configure(*args)
        config.num_moe_experts, config.moe_router_topk, config.moe_ffn_hidden_size = EXPERTS, CHOSEN, WIDTH
        config.moe_token_dispatcher_type, config.moe_router_load_balancing_type = "alltoall", "none"
        config.expert_model_parallel_size = torch.distributed.get_world_size()
        config.moe_latent_size, config.transformer_impl = latent or None, "local"
        config.moe_router_force_load_balancing = bool(latent)  # forecasts know no loads of single experts
        return config

    def layer_spec(**given: Any) -> Any:
        layer: Any = spec(**given, num_experts=EXPERTS, moe_grouped_gemm=False)
        layer.submodules.mlp = partial(LatentMoELayer, **layer.submodules.mlp.keywords)
        return layer

    one_device._configuration = configuration
    gpt_layer_specs.get_gpt_layer_local_spec = layer_spec


def measure(rank: int, world: int, name: str) -> dict[str, tuple[list[int], int]]:
    """Return (tokens at the experts of each layer, peak live bytes) of a step, by plan."""
    from megatron.core import parallel_state

    from megatron.bytescale.training import one_device

    torch.set_num_threads(1)
    parallel_state.initialize_model_parallel(expert_model_parallel_size=world)
    with_experts(SHAPES[name].expert_latent)
    built: Any
    if name.startswith("fused"):
        built = build_fused(SHAPE)
    else:
        built = one_device.build_model(SHAPE, torch.float32, 1 << 28, LOSS_TOKENS, on_cpu=True)
    parameters = list(built.model.parameters())
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    gradients = [parameter.grad for parameter in parameters]
    existing = [*parameters, *gradients, *built.weights, built.store.link.arena.memory]
    loads: list[int] = []
    for layer in built.model.decoder.layers:
        layer.mlp.experts.register_forward_pre_hook(lambda module, inputs: loads.append(len(inputs[0])))
    found = {}
    for name, plan in {"first": PLANS["none"], **PLANS}.items():
        built.store.plan = plan
        tokens = built.batch(LENGTH, rank)
        loads.clear()
        with AllocationTrace(existing) as trace:
            built.loss(tokens).backward()
        built.store.check_empty()
        found[name] = list(loads), liveness_bound(trace.requests())
    return found


def predicted(plan: ActivationPlan, load: float, shape: ModelShape, operators: LayerOperators) -> float:
    """Return the forecast, plus the two hidden states that the final norm and the loss keep."""
    settings = LayerSettings(
        element_bytes=FLOAT_BYTES, resident_layers=plan.resident_layers, loss_tokens=LOSS_TOKENS,
        expert_load=load, expert_ranks=2, operators=operators,
    )  # fmt: skip
    of_step = layer_load(cost_of_rates(shape, 1e12, 1e12, 1e12), LENGTH, settings)
    ends = 2.0 * LENGTH * SHAPE.hidden * FLOAT_BYTES
    return forecast(plan, of_step, Machine(1e12, 1e12)).device_bytes + ends


@pytest.mark.full
@pytest.mark.parametrize("kind", SHAPES)
def test_live_bytes_with_experts_are_those_of_the_prediction(kind: str) -> None:
    ranks = run_ranks(measure, 2, kind)
    for name, plan in PLANS.items():
        for found in ranks:
            loads, live = found[name]
            assert len(loads) == SHAPE.num_layers
            load = sum(loads) / len(loads) / (CHOSEN * LENGTH)
            expected = predicted(plan, load, SHAPES[kind], OPERATORS[kind.split(",")[0]])
            assert expected == pytest.approx(live, rel=TOLERANCES[SHAPES[kind].expert_latent]), (
                name,
                load,
                expected / live,
            )
    assert sum(sum(found["none"][0]) for found in ranks) == 2 * SHAPE.num_layers * CHOSEN * LENGTH
