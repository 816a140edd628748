from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace

import pytest

from bytescale_ext.errors import PlanError
from bytescale_ext.plan.memory import (
    MemoryPlan,
    Request,
    TwoLevelPlan,
    check_memory_plan,
    liveness_bound,
    place_best_fit,
    plan_memory,
    requests_within,
)
from bytescale_ext.plan.memory_exact import improve


def random_requests(dice: random.Random, count: int, largest: int = 6) -> list[Request]:
    starts = sorted(dice.randrange(10) for _ in range(count))
    return [Request(f"t{i}", dice.randint(1, largest), s, s + dice.randint(1, 6)) for i, s in enumerate(starts)]


def layer_trace(num_layers: int) -> list[Request]:
    """Two saved tensors and three transient ones in each layer's forward pass, two transient ones in its backward."""
    requests, end = [], num_layers * 16
    for layer in range(num_layers):
        begin, back = layer * 8, end - (layer + 1) * 8
        requests += [
            Request("saved", 40, begin, back + 8), Request("a", 10, begin + 1, begin + 3),
            Request("b", 30, begin + 2, begin + 5), Request("saved too", 20, begin + 3, back + 4),
            Request("c", 20, begin + 4, begin + 6), Request("d", 50, back + 1, back + 5),
            Request("e", 30, back + 2, back + 8),
        ]  # fmt: skip
    return sorted(requests, key=lambda r: r.start)


def best_peak(requests: list[Request]) -> int:
    """By brute force: each order in turn, every request as low as it goes; some order gives the optimum."""

    def lowest(order: tuple[Request, ...]) -> int:
        placed: list[tuple[int, Request]] = []
        for request in order:
            spots = [0, *sorted(a + r.num_bytes for a, r in placed)]
            address = next(
                spot for spot in spots
                if all(not request.overlaps(r) or spot >= a + r.num_bytes or a >= spot + request.num_bytes
                       for a, r in placed)
            )  # fmt: skip
            placed.append((address, request))
        return max(a + r.num_bytes for a, r in placed)

    return min(lowest(order) for order in itertools.permutations(requests))


def test_placements_are_valid_and_not_below_the_bound() -> None:
    dice = random.Random(0)
    for _ in range(200):
        plan = plan_memory(random_requests(dice, dice.randint(1, 25)))
        check_memory_plan(plan)
        assert plan.peak >= plan.bound
        assert plan.is_optimal == (plan.peak == plan.bound)


def test_solver_finds_the_optimum_of_brute_force() -> None:
    pytest.importorskip("ortools")
    dice = random.Random(1)
    better = 0
    for _ in range(40):
        requests = random_requests(dice, 6)
        greedy = plan_memory(requests)
        plan = improve(greedy)
        assert plan.is_optimal
        assert plan.peak == best_peak(requests)
        better += plan.peak < greedy.peak
    hard = [
        Request("a", 3, 0, 4),
        Request("b", 3, 3, 7),
        Request("c", 2, 2, 6),
        Request("d", 4, 5, 9),
        Request("e", 1, 0, 9),
    ]
    assert improve(plan_memory(hard)).peak == best_peak(hard)


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


def test_bad_plans_are_refused() -> None:
    plan = plan_memory(layer_trace(2))
    with pytest.raises(PlanError, match="share memory"):
        check_memory_plan(replace(plan, addresses=(0,) * len(plan.requests)))
    with pytest.raises(PlanError, match="lies at -1"):
        check_memory_plan(replace(plan, addresses=(-1, *plan.addresses[1:])))
    with pytest.raises(PlanError, match="addresses"):
        check_memory_plan(replace(plan, addresses=plan.addresses[1:]))
    with pytest.raises(PlanError, match="liveness bound"):
        check_memory_plan(replace(plan, bound=1))
    with pytest.raises(ValueError, match="positive size and life"):
        plan_memory([Request("a", 0, 0, 1)])
    with pytest.raises(ValueError, match="positive size and life"):
        plan_memory([Request("a", 1, 2, 2)])


def test_json_comes_back() -> None:
    plan = plan_memory(layer_trace(2))
    assert MemoryPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    two = TwoLevelPlan({"forward": plan, "backward": plan_memory([])}, plan)
    assert TwoLevelPlan.from_json(json.loads(json.dumps(two.to_json()))) == two
    broken = plan.to_json()
    broken["requests"][0][4] = broken["requests"][1][4] = 0
    with pytest.raises(PlanError):
        MemoryPlan.from_json(broken)


def test_nothing_needs_nothing() -> None:
    plan = plan_memory([])
    assert plan.peak == plan.bound == 0 and plan.is_optimal
