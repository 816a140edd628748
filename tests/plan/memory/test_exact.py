from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from bytescale_ext.plan.memory.exact import improve
from bytescale_ext.plan.memory.placement import plan_memory
from bytescale_ext.plan.memory.plan import Request
from tests.plan.memory.traces import random_requests


def best_peak(requests: list[Request]) -> int:
    """Return the optimum by brute force: for every order, each request is placed as low as possible."""

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


@pytest.mark.full
@pytest.mark.slow
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


def test_addresses_stay_on_granules() -> None:
    pytest.importorskip("ortools")
    dice = random.Random(2)
    better = 0
    for _ in range(40):
        requests = [replace(r, num_bytes=512 * r.num_bytes) for r in random_requests(dice, 6)]
        greedy = plan_memory(requests)
        plan = improve(greedy)
        assert all(address % 512 == 0 for address in plan.addresses)
        better += plan.peak < greedy.peak
    assert better > 0
