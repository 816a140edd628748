from __future__ import annotations

import pytest

from bytescale_ext.plan.experts.gate import EXP, LINEAR, SCHEDULES, DenseToSparse


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_temperatures_fall_to_the_last_step(schedule: str) -> None:
    plan = DenseToSparse(2.0, 0.5, schedule, 8, 1e-3, 4)
    found = [plan.temperature(step) for step in range(8)]
    assert found[0] == 2.0
    assert found == sorted(found, reverse=True)
    assert found[-1] > 0.5
    assert plan.temperature(8) is plan.temperature(80) is None


def test_half_way() -> None:
    assert DenseToSparse(2.0, 0.5, EXP, 8, 1e-3, 4).temperature(4) == pytest.approx(1.0)
    assert DenseToSparse(2.0, 0.5, LINEAR, 8, 1e-3, 4).temperature(4) == pytest.approx(1.25)
