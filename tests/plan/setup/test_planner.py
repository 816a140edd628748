"""The planner follows the setup."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from bytescale_ext.config.slices import DocumentSliceConfig
from bytescale_ext.plan.cost.learned import LearnedCosts
from bytescale_ext.plan.schedule.document_slices import SliceRule
from bytescale_ext.plan.setup.choose import Decision
from bytescale_ext.plan.setup.forecast import Forecast
from bytescale_ext.plan.setup.planner import balanced_cost, planner_of
from bytescale_ext.plan.step.sizes import Slicing
from tests.config.runs import SHAPE, hdp_of, run_of
from tests.plan.simple_plans import plan_naive, plan_static

LENGTHS = (250, 3, 60, 130, 64)


def decision(**changes: Any) -> Decision:
    return run_of(hdp_of(rows_multiple=2, **changes)).decision


def test_planner_follows_the_setup() -> None:
    assert planner_of(decision(balance="none"))(LENGTHS) == plan_naive(LENGTHS, 4, 64, 2)
    assert planner_of(decision(balance="pp", num_stages=2))(LENGTHS).aligned
    assert planner_of(decision(static_width=4))(LENGTHS) == plan_static(LENGTHS, 4, 64, 4)
    assert planner_of(decision())(LENGTHS) != planner_of(decision(static_width=4))(LENGTHS)


def test_nothing_is_sliced_or_offloaded_by_default() -> None:
    hdp = hdp_of()
    plain = run_of(hdp).decision
    assert plain.finest == Slicing()
    assert plain.offloading_layers is None
    assert balanced_cost(plain) == plain.setup.cost.stage(SHAPE.num_layers, has_head=True)


def test_slices_of_documents_reach_the_planner() -> None:
    slices = DocumentSliceConfig(SliceRule(Slicing(3, 50).in_eager_order()), num_stages=2)
    sliced = run_of(hdp_of(balance="pp", num_stages=2), slices).decision
    assert sliced.finest == slices.slicing == Slicing(3, 50, True)
    assert slices.group_size == 3
    whole = run_of(hdp_of(balance="pp", num_stages=2)).decision
    assert planner_of(sliced) != planner_of(whole)


@pytest.mark.parametrize("stages", [{}, {"num_stages": 2, "balance": "pp"}])
def test_forecasts_follow_learned_costs_and_speeds(stages: dict[str, Any]) -> None:
    forecast = Forecast(decision(**stages))
    plan = planner_of(forecast.decision)(LENGTHS)
    usual = forecast.time_of_plan(plan)
    assert pickle.loads(pickle.dumps(forecast.time_of_plan))(plan) == usual  # the planner's process predicts too
    for learned in (LearnedCosts((3.0,) * 5), LearnedCosts(speeds=(1 / 3,) * 4)):
        slow = forecast.time_of_plan(plan, learned)
        assert slow.seconds - slow.update == pytest.approx(3 * (usual.seconds - usual.update), rel=0.01)
    one = forecast.time_of_plan(plan, LearnedCosts(speeds=(1.0, 1.0, 1.0, 0.1)))
    assert usual.makespan < one.makespan <= 10.1 * usual.makespan
