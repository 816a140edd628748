from __future__ import annotations

import random

import pytest

from bytescale_ext.plan.memory.check import check_memory_plan
from bytescale_ext.plan.memory.exact import improve
from bytescale_ext.plan.memory.placement import liveness_bound, place_best_fit, plan_memory, requests_within
from bytescale_ext.plan.memory.plan import Request
from tests.plan.memory.traces import layer_trace, random_requests


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


def test_bound_by_hand() -> None:
    assert liveness_bound([]) == 0
    assert liveness_bound([Request("a", 3, 0, 2), Request("b", 5, 2, 4)]) == 5  # one ends when the other begins
    assert liveness_bound([Request("a", 3, 0, 3), Request("b", 5, 2, 4)]) == 8


def test_the_smallest_gap_is_filled() -> None:
    requests = [Request("a", 9, 0, 9), Request("b", 5, 0, 3), Request("c", 5, 4, 9), Request("d", 2, 0, 9)]
    addresses = place_best_fit(requests)
    assert addresses[1] == addresses[2]


def test_transient_requests_of_a_window() -> None:
    requests = [Request("in", 1, 4, 6), Request("begins before", 1, 2, 6), Request("ends after", 1, 5, 9)]
    assert requests_within(requests, 4, 8) == [Request("in", 1, 0, 2)]


def test_nothing_needs_nothing() -> None:
    plan = plan_memory([])
    assert plan.peak == plan.bound == 0
    assert plan.is_optimal


@pytest.mark.parametrize("request_", [Request("a", 0, 0, 1), Request("a", 1, 2, 2)])
def test_requests_without_size_or_life_are_refused(request_: Request) -> None:
    with pytest.raises(ValueError, match="positive size and life"):
        plan_memory([request_])
