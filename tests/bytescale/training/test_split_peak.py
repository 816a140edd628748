"""The memory of a step equals the forecast with unfused operators, as on CPU: RMSNorm and SwiGLU.

``test_device_peak.py`` tests fused operators.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bytescale_ext.plan.activation.forecast import forecast
from bytescale_ext.plan.activation.load import LayerSettings, Machine, cost_of_rates, layer_load
from bytescale_ext.plan.activation.operators import LayerOperators
from bytescale_ext.plan.activation.plan import ActivationPlan
from bytescale_ext.plan.activation.tensors import layer_tensors
from bytescale_ext.plan.memory.placement import liveness_bound
from bytescale_ext.plan.memory.stage_memory import StageMemory
from bytescale_ext.plan.step.sizes import Cluster
from tests.bytescale.training.test_device_peak import FLOAT_BYTES, LENGTH, LOSS_TOKENS, PLANS, SHAPE
from tests.harness import run_ranks

pytestmark = pytest.mark.ranks

OPERATORS = LayerOperators(split_norms=True, split_activation=True, angles=SHAPE.head_dim, split_angles=True)
COST = cost_of_rates(SHAPE, 1e12, 1e12, 1e12)
MORE_PLANS = {
    "no layer resident": ActivationPlan("priced", 0.5, 0.5, 1.0, True),
    "nothing swapped": ActivationPlan("priced", 0.0, 0.3, 0.0, True),
}


def predicted(name: str) -> float:
    """Return the bytes of activations at their peak."""
    settings = LayerSettings(element_bytes=FLOAT_BYTES, loss_tokens=LOSS_TOKENS, operators=OPERATORS)
    if name in ("all", "full recompute"):
        tensors = [one.bytes_per_token for one in layer_tensors(SHAPE, FLOAT_BYTES, operators=OPERATORS)]
        cost, kept = replace(COST, layer_bytes=sum(tensors)), sum(tensors)
        stage = StageMemory.of(cost, (SHAPE.num_layers,), Cluster(1, LENGTH), settings)
        if name == "full recompute":
            kept = tensors[0]
            stage = stage.recomputing(kept)
        return stage.without_states().most_bytes([LENGTH * kept])
    return forecast({**PLANS, **MORE_PLANS}[name], layer_load(COST, LENGTH, settings), Machine(1e12, 1e12)).device_bytes


def measure(rank: int, world: int) -> dict[str, int]:
    """Return the peak live bytes of a step's activations, by plan."""
    from bytescale_ext.activation.trace import AllocationTrace
    from megatron.bytescale.training import one_device

    built = one_device.build_model(SHAPE, torch.float32, 1 << 28, LOSS_TOKENS, on_cpu=True)
    parameters, config = list(built.model.parameters()), built.model.decoder.config
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    states = [*parameters, *[parameter.grad for parameter in parameters], *built.weights, built.store.link.arena.memory]
    tokens, found = built.batch(LENGTH, 0), {}
    for name in (*PLANS, *MORE_PLANS, "all", "full recompute"):
        built.store.plan = {**PLANS, **MORE_PLANS}.get(name, ActivationPlan("none"))
        if name == "full recompute":
            config.recompute_granularity, config.recompute_method, config.recompute_num_layers = "full", "uniform", 1
        with AllocationTrace(states) as trace:
            built.loss(tokens).backward()
        built.store.check_empty()
        found[name] = liveness_bound(trace.requests())
    return found


@pytest.mark.full
def test_live_bytes_of_split_operators_are_within_five_percent_of_the_prediction() -> None:
    found = run_ranks(measure, 1, init_group=False)[0]
    assert len(found) == len(PLANS) + len(MORE_PLANS) + 2
    for name, live in found.items():
        assert predicted(name) == pytest.approx(live, rel=0.05), (name, predicted(name) / live)
    fused = layer_load(COST, LENGTH, LayerSettings(element_bytes=FLOAT_BYTES, loss_tokens=LOSS_TOKENS))
    assert forecast(PLANS["none"], fused, Machine(1e12, 1e12)).device_bytes < 0.75 * found["none"]
