"""Ranks with different plans, or with slow planners, in real training."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bytescale_ext.errors import OutOfTime
from tests.e2e.training import HDP, MODEL, TRAIN, plan_in_process, train, train_ranks, train_to_failure

pytestmark = pytest.mark.ranks


def main_with_planner(change: Callable[[Any], Any], ranks: Sequence[int]) -> None:
    """Entry (by ``partial``) with a different planner on some ranks."""
    import pretrain_gpt_hdp
    from megatron.bytescale.features.hdp import build as hdp

    original = hdp.planner_of
    if int(os.environ["RANK"]) in ranks:
        hdp.planner_of = lambda run: change(original(run))
    try:
        pretrain_gpt_hdp.main()
    finally:
        hdp.planner_of = original


def naive(planner: Any) -> Any:
    return replace(planner, balance="none")


def test_ranks_with_other_plans_stop_before_the_first_step(corpus: Path, tmp_path: Path) -> None:
    flags = [*MODEL, *TRAIN, "--data-path", corpus, *HDP]
    errors = train_to_failure(4, *flags, entry=partial(main_with_planner, naive, [2]), folder=tmp_path)
    for error in errors:
        assert error is not None
        last = error.splitlines()[-1]
        assert "PlanError: ranks have different plans of step 1" in last
        assert "on processes 0, 1, 3" in last
        assert "on processes 2" in last


class NeverInTime:
    """Planner that runs out of time in every second step."""

    def __init__(self, planner: Any) -> None:
        self.planner, self.num_plans = planner, 0

    def __call__(self, lengths: Sequence[int], should_stop: Callable[[], bool] | None = None) -> Any:
        self.num_plans += 1
        if self.num_plans % 2:
            return self.planner(lengths, None)
        raise OutOfTime

    def fallback(self, lengths: Sequence[int]) -> Any:
        return self.planner.fallback(lengths)


@pytest.mark.full
def test_when_one_planner_is_out_of_time_all_take_the_simple_plan(corpus: Path) -> None:
    flags = [*MODEL, *TRAIN, "--data-path", corpus, *HDP, "--train-iters", 4]
    expected = train(4, *flags, "--hdp-balance", "none").losses
    entry = partial(main_with_planner, NeverInTime, [1])
    outcomes = train_ranks(4, *flags, "--hdp-plan-seconds", 60, entry=entry)
    assert outcomes[-1].losses == pytest.approx(expected, rel=1e-5)
    said = "a plan was not ready after --hdp-plan-seconds 60; the simple plan"
    assert [outcome.text.count(said) for outcome in outcomes] == [1, 0, 0, 0]


def test_a_cost_file_of_another_model_is_refused(corpus: Path) -> None:
    from bytescale_ext.measure.cost_file import SHIPPED

    flags = [*MODEL, *TRAIN, "--data-path", corpus, *HDP, "--cost-file", SHIPPED / "bytescale_7b.json"]
    outcome = train_ranks(4, *flags)[0]
    assert outcome.code == 2
    assert "is for another model: hidden is 4096 there and 32 here" in outcome.text


def plan_in_another_process() -> None:
    """Entry that makes all plans after the first in a separate process, and prints when it starts."""
    import pretrain_gpt_hdp
    from bytescale_ext.data.loading.planning import PlannerInProcess

    start = PlannerInProcess._start

    def start_and_print(planner: PlannerInProcess) -> Any:
        print("PLANS ELSEWHERE")
        return start(planner)

    PlannerInProcess._start = start_and_print  # type: ignore[method-assign]
    plan_in_process(True)
    pretrain_gpt_hdp.main()


@pytest.mark.full
def test_plans_of_another_process_train_alike(corpus: Path) -> None:
    flags = [*MODEL, *TRAIN, "--data-path", corpus, *HDP, "--hdp-tokens-per-rank", 128, "--train-iters", 3]
    here = train_ranks(2, *flags)
    elsewhere = train_ranks(2, *flags, entry=plan_in_another_process)
    assert [outcome.text.count("PLANS ELSEWHERE") for outcome in elsewhere] == [1, 1]
    assert elsewhere[-1].losses == here[-1].losses
    assert len(here[-1].losses) == 3
