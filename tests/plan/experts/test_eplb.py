from __future__ import annotations

import numpy as np

from bytescale_ext.plan.experts.check import check_placement
from bytescale_ext.plan.experts.cost import balance_ratio
from bytescale_ext.plan.experts.eplb import packed
from bytescale_ext.plan.experts.placement import PlacementPlan


def test_popular_experts_have_most_copies() -> None:
    loads = np.array([[90, 4, 3, 3, 2, 2]] * 3)
    plan = packed(PlacementPlan.static(6, 3, 3), loads)
    check_placement(plan, 6, 3)
    assert plan.slots == (
        (0, 1, -1),
        (2, 3, 0),
        (4, 5, 0),
    )  # the third replica, of expert 1, is useless on its home rank
    assert plan.quotas[0][0] == 342
    assert plan.quotas[1][2] == plan.quotas[2][2] == 341
    assert balance_ratio(plan.parts(), loads) < 1.1


def test_random_layers_are_valid() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        loads = rng.multinomial(999, rng.dirichlet([0.3] * 12), size=4)
        check_placement(packed(PlacementPlan.static(12, 4, 5), loads), 12, 5)
