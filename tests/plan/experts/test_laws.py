"""Properties of the plans of both planners, for any loads and any change of loads."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bytescale_ext.plan.experts.check import check_placement
from bytescale_ext.plan.experts.cost import ExpertCost, step_seconds
from bytescale_ext.plan.experts.eplb import packed
from bytescale_ext.plan.experts.flexmoe import follow
from bytescale_ext.plan.experts.placement import Ints, PlacementPlan
from bytescale_ext.plan.experts.replay import Planner

COST = ExpertCost(1e-6, 2e-8, 5e-7)
THRESHOLD = 1.1


def flexmoe(plan: PlacementPlan, loads: Ints) -> PlacementPlan:
    return follow(plan, loads, COST, THRESHOLD)


PLANNERS: dict[str, Planner] = {"flexmoe": flexmoe, "eplb": packed}


@st.composite
def layers(draw: Callable[..., int]) -> tuple[int, list[Ints]]:
    """Return the slots of a rank and the loads, [ranks, experts], of some steps with a few popular experts."""
    ranks, of_rank = draw(st.integers(2, 4)), draw(st.integers(1, 4))
    slots = draw(st.integers(of_rank, ranks * of_rank))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    sizes = [draw(st.sampled_from([0, 3, 100, 10**6])) for _ in range(draw(st.integers(1, 4)))]
    return slots, [rng.multinomial(size, rng.dirichlet([0.3] * ranks * of_rank), size=ranks) for size in sizes]


@pytest.mark.parametrize("name", PLANNERS)
@given(layer=layers())
@settings(max_examples=40, deadline=None)
def test_plans_keep_every_law_step_by_step(name: str, layer: tuple[int, list[Ints]]) -> None:
    slots, steps = layer
    num_ranks, num_experts = steps[0].shape
    plan = PlacementPlan.static(num_experts, num_ranks, slots)
    for loads in steps:
        plan = PLANNERS[name](plan, loads)
        check_placement(plan, num_experts, slots)


@pytest.mark.parametrize("name", PLANNERS)
@given(layer=layers())
@settings(max_examples=20, deadline=None)
def test_equal_loads_give_equal_plans(name: str, layer: tuple[int, list[Ints]]) -> None:
    """Equal loads give equal plans, so ranks need no communication."""
    slots, steps = layer
    num_ranks, num_experts = steps[0].shape
    static = PlacementPlan.static(num_experts, num_ranks, slots)
    first, second = (PLANNERS[name](static, loads) for loads in (steps[0], steps[0].copy()))
    assert first == second


@given(layer=layers())
@settings(max_examples=40, deadline=None)
def test_flexmoe_is_never_slower_than_no_replicas(layer: tuple[int, list[Ints]]) -> None:
    """The plan is not slower on the measured loads, except for the rounding of quotas."""
    slots, steps = layer
    num_ranks, num_experts = steps[0].shape
    static = PlacementPlan.static(num_experts, num_ranks, slots)
    for loads in steps:
        plan = flexmoe(static, loads)
        rounding = (COST.token_seconds + 4 * COST.exchange_seconds) * (num_experts + loads.sum() / 1024)
        before = step_seconds(static.parts(), loads, COST)
        assert step_seconds(plan.parts(), loads, COST) <= before + rounding


def test_more_slots_are_never_worse() -> None:
    rng = np.random.default_rng(3)
    loads = rng.multinomial(10_000, rng.dirichlet([0.4] * 16), size=4)
    free = ExpertCost(1e-6, 0.0, 0.0)
    times = []
    for slots in range(4, 9):
        plan = PlacementPlan.static(16, 4, slots)
        times.append(step_seconds(follow(plan, loads, free, 1.0).parts(), loads, free))
    assert times[1] < 0.9 * times[0]
    assert all(more <= 1.02 * fewer for fewer, more in pairwise(times))
