"""The policy in whole micro-batches and in slices: fitting options, memory, bounds and budgets."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from bytescale_ext.plan.evaluate.policy_choice import KEPT_SHARES
from bytescale_ext.plan.evaluate.slicing_choice import OPTIONS
from bytescale_ext.plan.search.costed import CostedStrategy, setup_of_strategy
from bytescale_ext.plan.search.strategy import PRICED, Strategy
from bytescale_ext.plan.setup.layers import stage_settings
from bytescale_ext.plan.setup.memory import stage_state_bytes
from bytescale_ext.plan.setup.policy import PolicySlices, under_policy
from bytescale_ext.plan.setup.setup import Setup
from bytescale_ext.plan.step.sizes import ONE_SLICE, Slicing
from tests.plan.search.tasks import COST, STEPS, small_task

LINK = 1e9
TASK = small_task(link_bytes_per_second=LINK)
PIPED = Strategy(1, (3, 3), 1024, shares_optimizer=True, chooses_slices=True, activations=PRICED)
SLICED, TIGHT, AMPLE = 0.004, 0.006, 0.5
"""Activation memory in GB: only slices fit, whole micro-batches fit under the policy, and everything fits."""
STEP = STEPS[0][:4]


def strategy_of(device_gb: float, host_gb: float = 0.01, strategy: Strategy = PIPED) -> Strategy:
    """Return a strategy with ``gigabytes`` of memory for activations on its fullest stage."""
    states = max(stage_state_bytes(setup_of_strategy(TASK, strategy)))
    return replace(strategy, device_gb=states / 1e9 + device_gb, host_gb=host_gb)


def stages_of(device_gb: float, host_gb: float = 0.01, strategy: Strategy = PIPED) -> Setup:
    return setup_of_strategy(TASK, strategy_of(device_gb, host_gb, strategy))


def slices_of(device_gb: float, host_gb: float = 0.01) -> PolicySlices:
    return PolicySlices(stages_of(device_gb, host_gb))


def test_with_memory_for_all_nothing_is_moved_or_rebuilt() -> None:
    whole = under_policy(stages_of(AMPLE))
    assert whole is not None
    assert whole.slicing == ONE_SLICE
    assert whole.host_bytes == 0.0
    assert whole.stages == (COST.stage(3), COST.stage(3, has_head=True))
    assert whole.slowest == whole.stages[1]
    for one in slices_of(AMPLE).fitting:
        assert one.stages == whole.stages, one.slicing


def test_less_memory_takes_longer_until_nothing_fits() -> None:
    found = [under_policy(stages_of(device_gb)) for device_gb in (AMPLE, 0.008, TIGHT, SLICED)]
    assert found[-1] is None
    fitting = [one for one in found if one is not None]
    for device_gb, one in zip((AMPLE, 0.008, TIGHT), fitting, strict=True):
        states = max(stage_state_bytes(stages_of(device_gb)))
        assert states < one.device_bytes <= states + device_gb * 1e9 * (1 + 1e-9)
        assert one.host_bytes <= 0.01e9 * (1 + 1e-9)
    for more, less in pairwise(fitting):
        assert more.slowest.both.b <= less.slowest.both.b
    assert fitting[0].slowest.both.b < fitting[-1].slowest.both.b


def test_slices_keep_keys_up_to_shares_of_the_context() -> None:
    found = [one.slicing for one in slices_of(AMPLE).fitting]
    assert len(set(found)) == len(found) == 1 + (len(OPTIONS) - 1) * len(KEPT_SHARES)
    assert {one.kept_tokens for one in found} == {int(TASK.context * share) for share in KEPT_SHARES}
    assert found[0] == ONE_SLICE


def test_more_slices_hold_less_and_kept_keys_more() -> None:
    slices = slices_of(AMPLE)
    few, many = (slices.of(Slicing(number)).device_bytes for number in (2, 8))
    assert many < few < slices.of(ONE_SLICE).device_bytes
    kept = [slices.of(Slicing(8, kept)).device_bytes for kept in (0, TASK.context // 2, TASK.context)]
    assert kept == sorted(set(kept))


def test_virtual_stages_share_what_a_stage_holds_and_copies() -> None:
    strategy = replace(PIPED, chooses_slices=False, chunks=3)
    stages = stages_of(0.008, strategy=strategy)
    settings = stage_settings(stages, 0, ONE_SLICE)
    assert (settings.in_flight, settings.resident_layers) == (3, 0)  # seven passes of a third of the layers
    assert {one.running for one in settings.slices} == {1024}
    assert max(one.tokens for one in settings.slices) == pytest.approx(7 / 3 * 1024)
    found = under_policy(stages)
    assert found is not None
    assert not found.keeps_all
    assert len(found.virtual) == 6
    for stage, whole in enumerate(found.stages):
        chunks = found.virtual[stage::2]
        for one in ("a", "b", "g"):
            total = sum(getattr(chunk.both, one) for chunk in chunks)
            assert total == pytest.approx(getattr(whole.both, one)), one
    assert found.virtual[0] == found.virtual[2] != found.stages[0]
    kept = under_policy(stages_of(AMPLE, strategy=strategy))
    assert kept is not None
    assert kept.keeps_all
    assert kept.virtual == (*(COST.stage(1),) * 5, COST.stage(1, has_head=True))


@pytest.mark.parametrize("device_gb", [AMPLE, SLICED, 5e-4])
def test_it_fits_where_some_slices_do(device_gb: float) -> None:
    slices, states = slices_of(device_gb), max(stage_state_bytes(stages_of(device_gb)))
    assert slices.fits == bool(slices.fitting) == (device_gb >= SLICED)
    assert all(one.device_bytes <= states + device_gb * 1e9 * (1 + 1e-9) for one in slices.fitting)


def test_slices_fit_where_whole_micro_batches_do_not() -> None:
    budgets = np.geomspace(1e-3, 0.007, 6).tolist()
    whole = [under_policy(stages_of(gb)) is not None for gb in budgets]
    sliced = [slices_of(gb).fits for gb in budgets]
    assert all(one or not other for one, other in zip(sliced, whole, strict=True))
    assert sum(sliced) > sum(whole)


@pytest.mark.slow
@pytest.mark.parametrize("device_gb", [TIGHT, SLICED])
def test_a_strategy_runs_the_slices_that_the_policy_chose(device_gb: float) -> None:
    """The step is within the budgets, has the cost of the policy in these slices, and is not below its bound."""
    costed = CostedStrategy.of(TASK, strategy_of(device_gb))
    slices = costed.forecast.decision.slices
    assert isinstance(slices, PolicySlices)
    plan, figures = costed.planner(STEP), costed.run(STEP)
    assert plan.slicing is not None
    chosen = slices.of(plan.slicing)
    assert (figures.device_bytes, figures.host_bytes) == (chosen.device_bytes, chosen.host_bytes)
    work = [(float(sum(STEP)), float(sum(length * length for length in STEP)))]
    assert costed.least_seconds(work) <= costed.bound(STEP) + 1e-12
    assert costed.bound(STEP) <= figures.seconds
    assert (plan.slicing == ONE_SLICE) <= (device_gb > SLICED)
