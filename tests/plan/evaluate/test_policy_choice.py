"""Slices under an activation policy: the fastest option that fits, with the cost of each option."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bytescale_ext.measure.cost_file import shipped
from bytescale_ext.plan.cost.nodes import Nodes
from bytescale_ext.plan.evaluate.policy_choice import PolicyChoice, PolicyOption
from bytescale_ext.plan.evaluate.replay import replay_stages
from bytescale_ext.plan.evaluate.slicing_choice import TimedSlicing
from bytescale_ext.plan.hdp.aligned.search import PipelinedPlacer
from bytescale_ext.plan.hdp.planner import HdpPlanner
from bytescale_ext.plan.hdp.problem import Problem
from bytescale_ext.plan.setup.costs import stage_costs
from bytescale_ext.plan.setup.setup import setup_of_cost
from bytescale_ext.plan.step.check import check_step_plan
from bytescale_ext.plan.step.placed import PlacedRanks
from bytescale_ext.plan.step.plan import StepPlan
from bytescale_ext.plan.step.sizes import ONE_SLICE, Cluster, Slicing

CLUSTER, STAGES = Cluster(8, 8192), 4
COSTS = stage_costs(setup_of_cost(shipped("bytescale_7b"), STAGES))
LENGTHS = [60_000, 30_000, *(9_000,) * 4, *(3_000,) * 30, *(500,) * 60]
OPTIONS = (ONE_SLICE, Slicing(4, 60_000), Slicing(8, 60_000))


def planned(*slower: float) -> StepPlan:
    """Choose slices for options with slower stages, and return the plan. ``factors``: slowdown of each option."""
    options = tuple(
        PolicyOption(option, replace(COSTS[-1], backward=COSTS[-1].backward.scaled(factor)))
        for option, factor in zip(OPTIONS, slower, strict=True)
    )
    plan = HdpPlanner(CLUSTER, COSTS, balance="pp", choice=PolicyChoice(options))(LENGTHS)
    check_step_plan(plan, LENGTHS)
    assert plan.slicing in OPTIONS
    return plan


@pytest.mark.slow
def test_the_fastest_option_at_equal_cost_is_the_fastest_by_hand() -> None:
    by_hand = [
        replay_stages(HdpPlanner(CLUSTER, COSTS, option, balance="pp")(LENGTHS), (COSTS[-1],) * STAGES, option).makespan
        for option in OPTIONS
    ]
    assert planned(1.0, 1.0, 1.0).slicing == OPTIONS[int(np.argmin(by_hand))] != ONE_SLICE


@pytest.mark.slow
def test_what_the_policy_costs_decides() -> None:
    assert planned(1.0, 3.0, 3.0).slicing == ONE_SLICE
    assert planned(3.0, 1.0, 3.0).slicing == OPTIONS[1]


def test_a_step_keeps_the_nodes_of_its_cluster() -> None:
    """The cost of an option is for one node. A step on several nodes also pays for the links between them."""
    seen: list[Problem] = []

    def place(problem: Problem, thorough: bool) -> PlacedRanks:
        if not thorough:
            seen.append(problem)
        return PipelinedPlacer()(problem, thorough)

    nodes = Nodes(4, 6.0)
    stages = tuple(stage.on(nodes) for stage in COSTS)
    problem = Problem(np.array(LENGTHS), -(-np.array(LENGTHS) // CLUSTER.tokens_per_rank), CLUSTER, stages)
    PolicyChoice((PolicyOption(OPTIONS[1], COSTS[-1]), PolicyOption(OPTIONS[2], COSTS[-1])))(problem, place)
    assert sorted(one.slicing.num_slices for one in seen) == [4, 8]
    for one in seen:
        assert one.stages == (COSTS[-1].on(nodes),) * STAGES


@pytest.mark.slow
def test_steps_that_are_placed_alike_are_placed_once() -> None:
    """Options with length limits beyond the longest sequence of the step differ only in their budgets."""
    seen: list[Problem] = []

    def place(problem: Problem, thorough: bool) -> PlacedRanks:
        if not thorough:
            seen.append(problem)
        return PipelinedPlacer()(problem, thorough)

    problem = Problem(np.array(LENGTHS), -(-np.array(LENGTHS) // CLUSTER.tokens_per_rank), CLUSTER, COSTS)
    alike = tuple(PolicyOption(Slicing(8, kept), COSTS[-1]) for kept in (60_000, 120_000, 240_000))
    slicing, _ = PolicyChoice(alike)(problem, place)
    assert len(seen) == 1
    assert slicing == alike[0].slicing
    PolicyChoice((*alike, PolicyOption(Slicing(8), COSTS[-1])))(problem, place)
    assert [one.slicing for one in seen[1:]] == [Slicing(8), alike[0].slicing]


def test_options_that_keep_the_same_rings_are_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[Slicing] = []
    of = TimedSlicing.of

    def noted(problem: Problem, placed: PlacedRanks) -> TimedSlicing:
        timed.append(problem.slicing)
        return of(problem, placed)

    monkeypatch.setattr(TimedSlicing, "of", noted)
    problem = Problem(np.array(LENGTHS), -(-np.array(LENGTHS) // CLUSTER.tokens_per_rank), CLUSTER, COSTS)
    options = tuple(PolicyOption(Slicing(4, kept), COSTS[-1]) for kept in (29_999, 30_000, 59_999, 60_000, 120_000))
    placed = PipelinedPlacer()(options[-1].of(problem), thorough=False)
    assert set(placed.lengths[placed.widths > 1].tolist()) >= {60_000, 30_000}
    found = PolicyChoice(options)._timed(problem, placed)
    assert [one.slicing for one, _ in found] == [option.slicing for option in options]
    assert len(timed) == 3
    for one, option in found:
        assert one.seconds == pytest.approx(of(option.of(problem), placed).seconds)
