"""The planner follows the configuration of a run."""

from __future__ import annotations

from typing import Any

from bytescale_ext.config.planner import offload_layers, planner_of, slicing, step_cost
from bytescale_ext.config.run import RunConfig
from bytescale_ext.config.slices import DocumentSliceConfig
from bytescale_ext.plan.schedule.document_slices import SliceRule
from bytescale_ext.plan.step.sizes import Slicing
from tests.config.runs import hdp_of, run_of
from tests.plan.simple_plans import plan_naive, plan_static

LENGTHS = (250, 3, 60, 130, 64)


def run(**changes: Any) -> RunConfig:
    return run_of(hdp_of(rows_multiple=2, **changes))


def test_planner_follows_the_configuration() -> None:
    assert planner_of(run(balance="none"))(LENGTHS) == plan_naive(LENGTHS, 4, 64, 2)
    assert planner_of(run(balance="pp", num_stages=2))(LENGTHS).aligned
    assert planner_of(run(static_width=4))(LENGTHS) == plan_static(LENGTHS, 4, 64, 4)
    assert planner_of(run())(LENGTHS) != planner_of(run(static_width=4))(LENGTHS)


def test_nothing_is_sliced_or_offloaded_by_default() -> None:
    hdp = hdp_of()
    assert slicing(run_of(hdp)) == Slicing()
    assert offload_layers(run_of(hdp)) is None
    assert step_cost(run_of(hdp)) == hdp.cost


def test_slices_of_documents_reach_the_planner() -> None:
    slices = DocumentSliceConfig(SliceRule(Slicing(3, 50).two_ahead()), num_stages=2)
    sliced = run_of(hdp_of(balance="pp", num_stages=2), slices)
    assert slicing(sliced) == slices.slicing == Slicing(3, 50, True)
    assert slices.group_size == 3
    whole = run_of(hdp_of(balance="pp", num_stages=2))
    assert planner_of(sliced) != planner_of(whole)
