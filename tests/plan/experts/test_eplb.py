from __future__ import annotations

import numpy as np

from bytescale_ext.plan.experts.check import check_placement
from bytescale_ext.plan.experts.cost import balance_ratio
from bytescale_ext.plan.experts.eplb import packed
from bytescale_ext.plan.experts.placement import PARTS, PlacementPlan


def test_popular_experts_have_most_copies() -> None:
    loads = np.array([[90, 4, 3, 3, 2, 2]] * 3)
    plan = packed(PlacementPlan.static(6, 3, 3), loads)
    check_placement(plan, 6, 3)
    assert plan.slots == ((0, 1, -1), (2, 3, 0), (4, 5, 0))  # the third replica, of expert 1, is of no use at home
    assert plan.quotas[0][0] == 342
    assert plan.quotas[1][2] == plan.quotas[2][2] == 341
    assert balance_ratio(plan.parts(), loads) < 1.1


def test_it_forgets_the_plan_before() -> None:
    loads = np.array([[5, 90, 3, 3]] * 2)
    first = packed(PlacementPlan.static(4, 2, 3), loads)
    assert packed(first, loads) == first
    assert packed(first, loads[:, ::-1]) == packed(PlacementPlan.static(4, 2, 3), loads[:, ::-1])


def test_every_expert_is_everywhere_at_most() -> None:
    plan = packed(PlacementPlan.static(4, 2, 4), np.array([[1, 2, 3, 4]] * 2))
    check_placement(plan, 4, 4)
    assert plan.num_replicas == 4
    assert set(plan.quotas[0]) == {PARTS // 2}


def test_no_free_slots() -> None:
    static = PlacementPlan.static(4, 2, 2)
    assert packed(static, np.array([[9, 1, 1, 1]] * 2)) == static


def test_random_layers_are_valid() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        loads = rng.multinomial(999, rng.dirichlet([0.3] * 12), size=4)
        check_placement(packed(PlacementPlan.static(12, 4, 5), loads), 12, 5)
