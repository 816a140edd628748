"""The policy in whole micro-batches and in slices: what fits, what it holds, and that bounds and budgets hold."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from bytescale_ext.plan.evaluate.policy_choice import KEPT_SHARES
from bytescale_ext.plan.evaluate.slicing_choice import OPTIONS
from bytescale_ext.plan.search.case import Case, memory_of
from bytescale_ext.plan.search.policy import PricedSlices, PricedStages
from bytescale_ext.plan.search.strategy import PRICED, Strategy
from bytescale_ext.plan.search.task import Unfit, cluster_of
from bytescale_ext.plan.step.sizes import ONE_SLICE, Slicing
from tests.plan.search.tasks import COST, STEPS, small_task

LINK = 1e9
TASK = small_task()
PIPED = Strategy(1, (3, 3), 1024, shares_optimizer=True, chooses_slices=True, activations=PRICED)
SLICED, TIGHT, AMPLE = 0.004, 0.006, 0.5
"""Gigabytes in which only slices fit, in which whole micro-batches fit under the policy, and in which all fits."""
STEP = STEPS[0][:4]


def stages_of(device_gb: float, host_gb: float = 0.01, strategy: Strategy = PIPED) -> PricedStages:
    strategy = replace(strategy, device_gb=device_gb, host_gb=host_gb)
    cluster = cluster_of(TASK, strategy)
    states = memory_of(COST, strategy, cluster).state_bytes
    return PricedStages(strategy, COST, cluster, states, TASK.context, LINK)


def slices_of(device_gb: float, host_gb: float = 0.01) -> PricedSlices:
    return PricedSlices(stages_of(device_gb, host_gb), COST.whole().both)


def test_with_memory_for_all_nothing_is_moved_or_rebuilt() -> None:
    whole = stages_of(AMPLE).under_policy()
    assert whole is not None
    assert whole.slicing == ONE_SLICE
    assert whole.host_bytes == 0.0
    assert whole.stages == (COST.stage(3), COST.stage(3, has_head=True))
    assert whole.slowest == whole.stages[1]
    for one in slices_of(AMPLE).found:
        assert one.stages == whole.stages, one.slicing


def test_less_memory_takes_longer_until_nothing_fits() -> None:
    found = [stages_of(device_gb).under_policy() for device_gb in (AMPLE, 0.008, TIGHT, SLICED)]
    assert found[-1] is None
    fitting = [one for one in found if one is not None]
    for device_gb, one in zip((AMPLE, 0.008, TIGHT), fitting, strict=True):
        states = max(stages_of(device_gb).state_bytes)
        assert states < one.device_bytes <= states + device_gb * 1e9 * (1 + 1e-9)
        assert one.host_bytes <= 0.01e9 * (1 + 1e-9)
    for more, less in pairwise(fitting):
        assert more.slowest.both.b <= less.slowest.both.b
    assert fitting[0].slowest.both.b < fitting[-1].slowest.both.b


def test_slices_keep_keys_up_to_shares_of_the_context() -> None:
    found = [one.slicing for one in slices_of(AMPLE).found]
    assert len(set(found)) == len(found) == 1 + (len(OPTIONS) - 1) * len(KEPT_SHARES)
    assert {one.kept_tokens for one in found} == {int(TASK.context * share) for share in KEPT_SHARES}
    assert found[0] == ONE_SLICE


def test_more_slices_hold_less_and_kept_keys_more() -> None:
    slices = slices_of(AMPLE)
    few, many = (slices.of(Slicing(number)).device_bytes for number in (2, 8))
    assert many < few < slices.of(ONE_SLICE).device_bytes
    kept = [slices.of(Slicing(8, kept)).device_bytes for kept in (0, TASK.context // 2, TASK.context)]
    assert kept == sorted(set(kept))


def test_settings_of_stages() -> None:
    stages = stages_of(TIGHT, strategy=replace(PIPED, loss_tokens=256, expert_parallel=2))
    first, last = (stages.settings(stage, ONE_SLICE, (1,)) for stage in (0, 1))
    assert (first.in_flight, last.in_flight) == (2, 1)
    assert (first.resident_layers, last.resident_layers > 0) == (0, True)
    assert (first.loss_tokens, last.loss_tokens) == (0, 256)
    assert first.slices == last.slices == ()
    assert first.expert_load > 1
    in_slices = stages.settings(0, Slicing(4), (1024,) * 4)
    assert in_slices.in_flight > first.in_flight
    assert max(one.tokens for one in in_slices.slices) < 2 * 1024  # whole micro-batches hold as many
    assert {one.running for one in in_slices.slices} == {256.0}


def test_virtual_stages_share_what_a_stage_holds_and_copies() -> None:
    strategy = replace(PIPED, chooses_slices=False, chunks=3)
    stages = stages_of(0.008, strategy=strategy)
    how = stages.settings(0, ONE_SLICE, (1,))
    assert (how.in_flight, how.resident_layers) == (3, 0)  # seven passes of a third of the layers
    assert {one.running for one in how.slices} == {1024}
    assert max(one.tokens for one in how.slices) == pytest.approx(7 / 3 * 1024)
    found = stages.under_policy()
    assert found is not None
    assert not found.keeps_all
    assert len(found.virtual) == 6
    for stage, whole in enumerate(found.stages):
        chunks = found.virtual[stage::2]
        for one in ("a", "b", "g"):
            total = sum(getattr(chunk.both, one) for chunk in chunks)
            assert total == pytest.approx(getattr(whole.both, one)), one
    assert found.virtual[0] == found.virtual[2] != found.stages[0]
    kept = stages_of(AMPLE, strategy=strategy).under_policy()
    assert kept is not None
    assert kept.keeps_all
    assert kept.virtual == (*(COST.stage(1),) * 5, COST.stage(1, has_head=True))


@pytest.mark.parametrize("device_gb", [AMPLE, SLICED, 5e-4])
def test_it_fits_where_some_slices_do(device_gb: float) -> None:
    slices, states = slices_of(device_gb), max(stages_of(device_gb).state_bytes)
    assert slices.fits == bool(slices.found) == (device_gb >= SLICED)
    assert all(one.device_bytes <= states + device_gb * 1e9 * (1 + 1e-9) for one in slices.found)


def test_slices_fit_where_whole_micro_batches_do_not() -> None:
    budgets = np.geomspace(1e-3, 0.007, 6).tolist()
    whole = [stages_of(gb).under_policy() is not None for gb in budgets]
    sliced = [slices_of(gb).fits for gb in budgets]
    assert all(one or not other for one, other in zip(sliced, whole, strict=True))
    assert sum(sliced) > sum(whole)


@pytest.mark.parametrize("device_gb", [TIGHT, SLICED])
def test_a_case_runs_the_slices_that_the_policy_chose(device_gb: float) -> None:
    """The step is within the budgets, costs what the policy costs in these slices, and keeps to its bound."""
    case = Case.of(TASK, replace(PIPED, device_gb=device_gb, host_gb=0.01))
    slices = case.priced_slices
    assert slices is not None
    plan, figures = case.planner(STEP), case.run(STEP)
    assert plan.slicing is not None
    chosen = slices.of(plan.slicing)
    assert (figures.device_bytes, figures.host_bytes) == (chosen.device_bytes, chosen.host_bytes)
    assert case.least_seconds([(float(sum(STEP)), float(sum(n * n for n in STEP)))]) <= case.bound(STEP) + 1e-12
    assert case.bound(STEP) <= figures.seconds
    assert (plan.slicing == ONE_SLICE) <= (device_gb > SLICED)


def test_no_slices_fit_in_no_memory() -> None:
    with pytest.raises(Unfit, match="device memory"):
        Case.of(TASK, replace(PIPED, device_gb=0.0))
    plain = Case.of(TASK, replace(PIPED, activations="keep", device_gb=AMPLE))
    assert plain.priced_slices is None
