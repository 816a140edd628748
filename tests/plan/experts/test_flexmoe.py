"""FlexMoE's scheduler against the optimum of small layers, and cases for each kind of change."""

from __future__ import annotations

from itertools import chain, combinations, product

import numpy as np
import pytest

from bytescale_ext.plan.experts.check import check_placement
from bytescale_ext.plan.experts.cost import ExpertCost, balance_ratio, rank_seconds, step_seconds
from bytescale_ext.plan.experts.flexmoe import follow
from bytescale_ext.plan.experts.placement import PARTS, PlacementPlan, home_parts, homes_of
from bytescale_ext.plan.experts.quotas import level_out
from tests.sample import sampled

COMPUTING = ExpertCost(1e-6, 0.0, 0.0)
COST = ExpertCost(1e-6, 2e-8, 2e-6)


def optimum(loads: np.ndarray, num_slots: int, cost: ExpertCost) -> float:
    """Return the least seconds over all placements, each with level ranks. ``loads``: [ranks, experts]."""
    num_ranks, num_experts = loads.shape
    homes = homes_of(num_experts, num_ranks)
    free = num_slots - num_experts // num_ranks
    choices = []
    for rank in range(num_ranks):
        others = np.flatnonzero(~homes[rank]).tolist()
        choices.append(list(chain.from_iterable(combinations(others, count) for count in range(free + 1))))
    best = np.inf
    for chosen in product(*choices):
        held = homes.copy()
        for rank, experts in enumerate(chosen):
            held[rank, list(experts)] = True
        tokens = np.where(held, loads.sum(0) / held.sum(0), 0.0)
        level_out(tokens, held, sweeps=30)
        best = min(best, float(rank_seconds(tokens, held & ~homes, loads, cost).max()))
    return best


@pytest.mark.slow
@pytest.mark.parametrize("cost", [COMPUTING, COST], ids=["computing", "all"])
@pytest.mark.parametrize(("experts", "ranks", "slots"), sampled([(4, 2, 3), (6, 2, 5), (6, 3, 3)], [(4, 2, 3)]))
def test_it_comes_near_the_optimum(experts: int, ranks: int, slots: int, cost: ExpertCost) -> None:
    for seed in range(6):
        rng = np.random.default_rng(seed)
        loads = rng.multinomial(4000, rng.dirichlet([0.6] * experts), size=ranks)
        plan = follow(PlacementPlan.static(experts, ranks, slots), loads, cost, threshold=1.0)
        check_placement(plan, experts, slots)
        found = step_seconds(plan.parts(), loads, cost)
        assert found <= 1.05 * optimum(loads, slots, cost) + 2e-6, f"{seed=}"


def test_below_the_threshold_the_placement_stays() -> None:
    loads = np.array([[130, 100, 100, 100]] * 2)
    static = PlacementPlan.static(4, 2, 3)
    assert follow(static, loads, COMPUTING, 1.1) == static
    assert follow(static, loads, COMPUTING, 1.0).num_replicas == 1


def test_a_popular_expert_expands_into_an_empty_slot() -> None:
    loads = np.array([[500, 10, 10, 10]] * 2)
    plan = follow(PlacementPlan.static(4, 2, 3), loads, COMPUTING, 1.15)
    assert plan.slots == ((0, 1, -1), (2, 3, 0))
    assert balance_ratio(plan.parts(), loads) < 1.01


def test_a_replica_migrates_from_a_busy_rank() -> None:
    """Expert 0 has a replica on rank 1, but the home expert of rank 1 is now popular. Its other slots cannot help."""
    before = home_parts(3, 3)
    before[:, 0] = [PARTS // 2, PARTS // 2, 0]
    loads = np.array([[60, 60, 0]] * 3)
    plan = follow(PlacementPlan.of(before, 2), loads, ExpertCost(1e-6, 0.0, 1e-6), 1.05)
    assert balance_ratio(plan.parts(), loads) < 1.1
    assert plan.slots[2][1] in (0, 1)


def test_copies_that_cost_more_than_they_gain_are_not_made() -> None:
    loads = np.array([[500, 10, 10, 10]] * 2)
    static = PlacementPlan.static(4, 2, 3)
    assert follow(static, loads, ExpertCost(1e-6, 0.0, 1.0), 1.15) == static


def test_the_replica_goes_where_the_tokens_are() -> None:
    """Ranks 1 and 2 have equally little work, and rank 2 sends most of the tokens for expert 0."""
    loads = np.array([[100, 0, 0], [100, 60, 0], [700, 0, 60]])
    cost = ExpertCost(1e-6, 1e-6, 0.0)
    plan = follow(PlacementPlan.static(3, 3, 2), loads, cost, 2.0)
    assert plan.slots[2] == (2, 0)
    assert plan.slots[1] == (1, -1)
