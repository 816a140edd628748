from __future__ import annotations

import itertools

import numpy as np
import pytest

from bytescale_ext.plan.cost.cost_model import CostModel, StageCost
from bytescale_ext.plan.evaluate.exact import brute_force, solve
from bytescale_ext.plan.evaluate.replay import replay
from bytescale_ext.plan.hdp.planner import HdpPlanner
from bytescale_ext.plan.step.sizes import Cluster
from tests.plan.simple_plans import plan_naive
from tests.sample import seeds

COST = CostModel(a=0.05, b=1.0, c=0.4)


def every_schedule(lengths: list[int], num_ranks: int, capacity: int, cost: CostModel) -> float:
    """Return the best makespan of all orders and all positions, without pruning."""
    places = [
        [(first, width) for width in range(-(-length // capacity), num_ranks + 1)
         for first in range(num_ranks - width + 1)]
        for length in lengths
    ]  # fmt: skip
    best = float("inf")
    for order in itertools.permutations(range(len(lengths))):
        for chosen in itertools.product(*(places[seq] for seq in order)):
            ready = [0.0] * num_ranks
            for seq, (first, width) in zip(order, chosen, strict=True):
                length = lengths[seq]
                seconds = cost.attention_cost(length, width) + cost.linear_cost(-(-length // width))
                ready[first : first + width] = [max(ready[first : first + width]) + seconds] * width
            best = min(best, max(ready))
    return best


@pytest.mark.parametrize("seed", range(6))
def test_brute_force_is_every_schedule(seed: int) -> None:
    random = np.random.default_rng(seed)
    lengths = random.integers(1, 25, size=4).tolist()
    assert brute_force(lengths, Cluster(3, 8), COST) == pytest.approx(every_schedule(lengths, 3, 8, COST))


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds(4))
def test_the_solver_agrees_with_brute_force(seed: int) -> None:
    pytest.importorskip("ortools")
    random = np.random.default_rng(100 + seed)
    lengths = np.minimum(32, 1 + random.pareto(0.6, size=6) * 2).astype(int).tolist()
    best = brute_force(lengths, Cluster(4, 8), COST)
    optimum = solve(lengths, Cluster(4, 8), COST, limit_seconds=20)
    assert optimum.is_proved
    assert optimum.bound <= best * (1 + 1e-9)
    assert optimum.bound == pytest.approx(best, rel=1e-4)
    assert optimum.makespan == pytest.approx(best, rel=1e-4)


@pytest.mark.slow
def test_no_plan_is_faster_than_the_optimum() -> None:
    random = np.random.default_rng(11)
    planner = HdpPlanner(Cluster(4, 8), (StageCost(COST, CostModel(a=0.0, b=0.0)),), balance="dp")
    for _ in range(5):
        lengths = np.minimum(32, 1 + random.pareto(0.6, size=6) * 2).astype(int).tolist()
        best = brute_force(lengths, Cluster(4, 8), COST)
        for plan in (plan_naive(lengths, 4, 8), planner(lengths)):
            assert replay(plan, COST).makespan >= best * (1 - 1e-9)


def test_what_does_not_fit_is_refused() -> None:
    for search in (brute_force, solve):
        with pytest.raises(ValueError, match="a sequence of 33 tokens needs 5 ranks, but there are 4"):
            search([3, 33], Cluster(4, 8), COST)
