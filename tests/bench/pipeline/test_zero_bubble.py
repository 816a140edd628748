"""What weight gradients that wait for idle time would gain."""

from __future__ import annotations

from pathlib import Path

import pytest

from bytescale_ext.measure.cost_file import shipped
from bytescale_ext.plan.evaluate.replay import replay_stages
from bytescale_ext.plan.evaluate.schedulers import stage_costs
from bytescale_ext.plan.schedule.actions import bubble_of_equal_costs, seq1f1b_schedule
from bytescale_ext.plan.schedule.simulate import peak_held
from bytescale_ext.plan.step.plan import StepPlan
from bytescale_ext.plan.step.sizes import ONE_SLICE, Slicing
from scripts.bench.pipeline import zero_bubble
from scripts.bench.pipeline.zero_bubble import Unit, step_seconds

STAGE = stage_costs(shipped("bytescale_7b"), 4)[0]
DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "results" / "slices.md"


def idle_share(num_stages: int, num_micro_batches: int, num_slices: int, unit: Unit) -> float:
    slicing = Slicing(num_slices, zero_bubble=unit.weights > 0)
    schedule = seq1f1b_schedule(num_stages, num_micro_batches, slicing)
    units = [unit] * (num_micro_batches * num_slices)
    return 1 - len(units) * unit.seconds / step_seconds(schedule, units)


def test_weight_gradients_fill_gaps() -> None:
    assert idle_share(4, 8, 1, Unit(1.0, 2.0, 0.0)) == pytest.approx(bubble_of_equal_costs(4, 8))
    # ZB-H1 (Qi et al. 2023, Table 2): idle (p - 1)(F + B - W) for equal F, B and W, a third of 1F1B's.
    assert idle_share(4, 8, 1, Unit(1.0, 1.0, 1.0)) == pytest.approx(3 / 27, abs=1e-9)


@pytest.mark.parametrize("num_stages", [1, 2, 4, 8])
@pytest.mark.parametrize("num_slices", [1, 3])
def test_waiting_weight_gradients_never_make_it_slower(num_stages: int, num_slices: int) -> None:
    shares = [idle_share(num_stages, 10, num_slices, Unit(1.0, 2.0 - weight, weight)) for weight in (0, 0.3, 0.6, 1)]
    assert all(0 <= share < 1 for share in shares) or num_stages == 1
    assert shares[0] == pytest.approx(bubble_of_equal_costs(num_stages, 10, num_slices))
    assert all(share <= shares[0] + 1e-9 for share in shares)
    assert num_stages == 1 or shares[-1] < shares[0]


@pytest.mark.parametrize("slicing", [ONE_SLICE, Slicing(4), Slicing(4).two_ahead()])
def test_arms_are_those_of_the_replay(slicing: Slicing) -> None:
    placed = zero_bubble.samples(8192, 3)
    arm = zero_bubble.arm_of(placed, 4, STAGE, slicing)
    plan = StepPlan(1, 8192, (8192,) * 3, placed, aligned=True)
    assert arm.seconds() == pytest.approx(replay_stages(plan, (STAGE,) * 4, slicing).makespan)
    assert sum(unit.tokens for unit in arm.pipelines[0]) == pytest.approx(3 * 8192)
    weights = sum(unit.weights for unit in arm.pipelines[0])
    assert weights == pytest.approx(3 * 8192 * STAGE.backward.b / 2)
    held = peak_held(seq1f1b_schedule(4, 3, slicing), 0) / slicing.num_slices
    assert arm.held_tokens == pytest.approx(8192 * held, rel=0.2)  # slices differ in tokens


def test_the_document_has_these_gains() -> None:
    gains = zero_bubble.gains_of(zero_bubble.samples(32 * zero_bubble.K, 2), 4, STAGE)
    row = "| samples of 32K | 4 | 2 | " + " | ".join(f"{gain:.1%}" for gain in (gains.lean, gains.roomy, gains.whole))
    assert row in DOCUMENT.read_text()
    assert gains.lean >= zero_bubble.TARGET
