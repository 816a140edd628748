from __future__ import annotations

import numpy as np
import pytest

from bytescale_ext.plan.experts.cost import ExpertCost
from bytescale_ext.plan.experts.replay import FLEXMOE, STATIC, PlacementSettings, replay_loads

COST = ExpertCost(1e-6, 0.0, 0.0)
# Two layers of 4 experts on 2 ranks: expert 0 is popular for three steps, then expert 3; the second layer is even.
POPULAR = [[300, 20, 20, 20]] * 3 + [[20, 20, 20, 300]] * 3
LOADS = np.array([[[row] * 2, [[90] * 4] * 2] for row in POPULAR])


def placing(name: str, interval: int = 1) -> PlacementSettings:
    return PlacementSettings(name, num_slots=3, threshold=1.15, interval=interval, cost=COST)


def test_a_plan_comes_one_step_after_its_loads() -> None:
    found = replay_loads(LOADS, placing(FLEXMOE))
    assert found.ratios.shape == (6, 2)
    uneven = (found.ratios[:, 0] > 1.15).tolist()
    assert uneven == [True, False, False, True, False, False]
    assert (found.ratios[:, 1] == 1).all()
    assert found.num_moves == 2
    assert len(found.planner_seconds) == 10
    assert found.last[0].slots == ((0, 1, 3), (2, 3, -1))
    assert found.seconds[0] == pytest.approx(1e-6 * (640 + 360))
    assert found.seconds[1] == pytest.approx(1e-6 * (360 + 360), rel=0.01)


def test_the_static_placement_never_changes() -> None:
    found = replay_loads(LOADS, placing(STATIC))
    assert found.num_moves == 0
    assert found.ratios[:, 0] == pytest.approx([640 / 360] * 6)
    assert found.mean_ratio == pytest.approx((640 / 360 + 1) / 2)
    assert found.late_ratio == pytest.approx(640 / 360)


def test_longer_intervals_add_loads_up() -> None:
    found = replay_loads(LOADS, placing(FLEXMOE, interval=2))
    assert len(found.planner_seconds) == 4
    assert (found.ratios[:2, 0] > 1.7).all()
    assert found.ratios[2, 0] < 1.15
