"""Slices under an activation policy: the fastest of those in which it fits, each at its own cost."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from bytescale_ext.measure.cost_file import shipped
from bytescale_ext.plan.evaluate.policy_choice import PolicyChoice, PolicyOption
from bytescale_ext.plan.evaluate.replay import replay_stages
from bytescale_ext.plan.evaluate.schedulers import stage_costs
from bytescale_ext.plan.hdp.planner import HdpPlanner
from bytescale_ext.plan.step.check import check_step_plan
from bytescale_ext.plan.step.plan import StepPlan
from bytescale_ext.plan.step.sizes import ONE_SLICE, Cluster, Slicing

CLUSTER, STAGES = Cluster(8, 8192), 4
COSTS = stage_costs(shipped("bytescale_7b"), STAGES)
LENGTHS = [60_000, 30_000, *(9_000,) * 4, *(3_000,) * 30, *(500,) * 60]
OPTIONS = (ONE_SLICE, Slicing(4, 60_000), Slicing(8, 60_000))


def planned(*slower: float) -> StepPlan:
    """The plan where the stages of each option take so many times as long."""
    options = tuple(
        PolicyOption(option, replace(COSTS[-1], backward=COSTS[-1].backward.scaled(factor)))
        for option, factor in zip(OPTIONS, slower, strict=True)
    )
    plan = HdpPlanner(CLUSTER, COSTS, balance="pp", choice=PolicyChoice(options))(LENGTHS)
    check_step_plan(plan, LENGTHS)
    assert plan.slicing in OPTIONS
    return plan


def test_the_fastest_option_at_equal_cost_is_the_fastest_by_hand() -> None:
    by_hand = [
        replay_stages(HdpPlanner(CLUSTER, COSTS, option, balance="pp")(LENGTHS), (COSTS[-1],) * STAGES, option).makespan
        for option in OPTIONS
    ]
    assert planned(1.0, 1.0, 1.0).slicing == OPTIONS[int(np.argmin(by_hand))] != ONE_SLICE


def test_what_the_policy_costs_decides() -> None:
    assert planned(1.0, 3.0, 3.0).slicing == ONE_SLICE
    assert planned(3.0, 1.0, 3.0).slicing == OPTIONS[1]


def test_an_empty_step() -> None:
    options = tuple(PolicyOption(option, COSTS[-1]) for option in OPTIONS)
    assert HdpPlanner(CLUSTER, COSTS, balance="pp", choice=PolicyChoice(options))([]).slicing == OPTIONS[-1]
