from __future__ import annotations

import random

import pytest

from bytescale_ext.plan.memory.check import check_memory_plan
from bytescale_ext.plan.memory.exact import improve
from bytescale_ext.plan.memory.placement import plan_memory
from bytescale_ext.plan.memory.plan import Request
from tests.plan.memory.traces import layer_trace, random_requests


@pytest.mark.slow
def test_placements_are_valid_and_not_below_the_bound() -> None:
    dice = random.Random(0)
    for _ in range(200):
        plan = plan_memory(random_requests(dice, dice.randint(1, 25)))
        check_memory_plan(plan)
        assert plan.peak >= plan.bound
        assert plan.is_optimal == (plan.peak == plan.bound)


def test_best_fit_meets_the_bound_on_layers() -> None:
    for num_layers in (1, 3, 12):
        plan = plan_memory(layer_trace(num_layers))
        assert plan.peak == plan.bound
        assert improve(plan) is plan


@pytest.mark.parametrize("request_", [Request("a", 0, 0, 1), Request("a", 1, 2, 2)])
def test_requests_without_size_or_life_are_refused(request_: Request) -> None:
    with pytest.raises(ValueError, match="positive size and life"):
        plan_memory([request_])
