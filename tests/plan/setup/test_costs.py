"""Cost of stages, and the stage that planners balance."""

from __future__ import annotations

from dataclasses import replace

from bytescale_ext.config.run import RunConfig
from bytescale_ext.plan.activation.load import cost_of_rates
from bytescale_ext.plan.cost.cost_model import StageCost
from bytescale_ext.plan.setup.costs import slowest_stage
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
