"""Numbers of a step that determine arrangements, against their formulas."""

from __future__ import annotations

import numpy as np
import pytest

from bytescale_ext.plan.cost.cost_model import CostModel, StageCost
from bytescale_ext.plan.hdp.aligned.step import AlignedStep
from bytescale_ext.plan.hdp.problem import Problem
from bytescale_ext.plan.step.sizes import Cluster, Slicing

STAGE = StageCost(CostModel(a=0.01, b=1.0, c=0.3, g=2.0), CostModel(a=0.025, b=2.0, c=0.6, g=4.0))
LENGTHS = np.array([400, 100, 30, 8])


def step_of(num_slices: int = 1, stage: StageCost = STAGE, num_stages: int = 4) -> AlignedStep:
    least = -(-LENGTHS // 100)
    return AlignedStep(Problem(LENGTHS, least, Cluster(8, 100), (stage,) * num_stages, Slicing(num_slices)))


@pytest.mark.parametrize(("num_slices", "ramp_slots", "overhead"), [(1, 3.0, 6.0), (2, 1.5, 12.0), (4, 0.75, 24.0)])
def test_slices_shorten_the_ramps_and_add_overheads(num_slices: int, ramp_slots: float, overhead: float) -> None:
    step = step_of(num_slices)
    assert step.ramp_slots == pytest.approx(ramp_slots)
    assert step.slot_overhead == pytest.approx(overhead)
    assert step_of(num_slices, num_stages=1).ramp_slots == 0


def test_exchange_hides_up_to_a_width_that_grows_with_length() -> None:
    widths = step_of().hidden_widths
    assert (np.diff(widths) <= 0).all()
    assert widths.min() >= 1
    assert widths.max() <= 8
    free = StageCost(CostModel(0.01, 1.0, 0.0, 2.0), CostModel(0.025, 2.0, 0.0, 4.0))
    assert step_of(stage=free).hidden_widths.tolist() == [8] * 4
