"""Cost of stages, and the stage that planners balance."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bytescale_ext.config.run import RunConfig
from bytescale_ext.plan.activation.load import cost_of_rates
from bytescale_ext.plan.cost.cost_model import StageCost
from bytescale_ext.plan.cost.model_cost import expert_share
from bytescale_ext.plan.setup.costs import slowest_stage
from bytescale_ext.plan.setup.layers import expert_load
from bytescale_ext.plan.setup.memory import stage_memory
from bytescale_ext.plan.step.sizes import Slicing
from tests.config.runs import SHAPE, hdp_of, run_of


def stage_cost(run: RunConfig) -> StageCost:
    return slowest_stage(run.decision.setup)[1]


def test_the_slowest_stage_is_named() -> None:
    hdp, shape = hdp_of(num_stages=2, balance="pp"), replace(SHAPE, num_layers=8)
    assert slowest_stage(run_of(shape=shape).decision.setup)[0] == 0
    assert slowest_stage(run_of(hdp, shape=shape, stage_layers=(7, 1)).decision.setup)[0] == 0
    assert slowest_stage(run_of(hdp, shape=shape, stage_layers=(1, 7)).decision.setup)[0] == 1


def test_costs_are_of_the_slowest_stage() -> None:
    """The slowest stage is the last stage with its head, unless another stage has many more layers."""
    hdp, shape = hdp_of(num_stages=2, balance="pp"), replace(SHAPE, num_layers=8)
    cost = cost_of_rates(shape, 1e12, 1e12, 1e12)
    for run in (run_of(hdp, shape=shape, cost=cost), run_of(hdp, shape=shape)):  # measured, and not measured
        assert stage_cost(run) == cost.stage(4, has_head=True)
    assert stage_cost(run_of(shape=shape, cost=cost)) == cost.stage(8, has_head=True)
    assert stage_cost(run_of(hdp, shape=shape, cost=cost, stage_layers=(7, 1))) == cost.stage(7)
    assert stage_cost(run_of(hdp, shape=shape, cost=cost, stage_layers=(1, 7))) == cost.stage(7, has_head=True)


def test_padded_rows_of_experts_take_time_and_memory() -> None:
    """In FP8 each of a rank's experts has up to 15 rows more; on average half of it."""
    sizes = {"num_expert_layers": 4, "num_experts": 8, "experts_per_token": 2, "expert_ffn_hidden": 1024}
    shape = replace(SHAPE, num_layers=4, **sizes)
    setup = run_of(shape=shape).decision.setup
    padded = replace(setup, numerics=replace(setup.numerics, rows=16))
    assert not setup.expert_padding
    assert padded.expert_padding == 8 * 15
    plain, cost = slowest_stage(setup)[1], slowest_stage(padded)[1]
    for before, after in ((plain.forward, cost.forward), (plain.backward, cost.backward)):
        assert after.g - before.g == pytest.approx(before.b * expert_share(shape, 4) * 8 * 7.5 / 2)
    assert slowest_stage(replace(padded, measured=True)) == slowest_stage(replace(setup, measured=True))
    more = 8 * 15 / (2 * setup.cluster.tokens_per_rank)
    assert expert_load(padded) - expert_load(setup) == pytest.approx(more)
    assert expert_load(padded, Slicing(4)) - expert_load(setup, Slicing(4)) == pytest.approx(4 * more)
    assert stage_memory(padded).layer.activations > stage_memory(setup).layer.activations
    spread = replace(padded, mesh=replace(padded.mesh, expert_parallel=4))
    assert spread.expert_padding == 2 * 15
