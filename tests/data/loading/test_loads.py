"""The expert imbalance of a step's plan is equal on every rank, even if some rank knows later steps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from bytescale_ext.data.loading.loader import StepLoader
from bytescale_ext.data.loading.loads import WINDOW, LoadHistory
from bytescale_ext.data.loading.planning import PlanMaker
from bytescale_ext.data.loading.step import LoaderSettings
from bytescale_ext.errors import OutOfTime
from bytescale_ext.plan.step.plan import StepPlan
from tests.data.sources import MemorySource
from tests.plan.simple_plans import plan_naive


def history_of(loads: dict[int, float], lag: int, window: int = WINDOW) -> LoadHistory:
    history = LoadHistory(lag, window)
    for step, load in loads.items():
        history.add(step, load)
    return history


def test_what_a_rank_learns_early_changes_nothing() -> None:
    early = history_of({0: 1.5, 1: 2.5, 2: 7.0, 3: 8.0}, lag=3)
    late = history_of({0: 1.5, 1: 2.5}, lag=3)
    assert early.at(4) == late.at(4) == 2.0


class Noting:
    """Planner like ``plan_naive`` that records the load of each step. The first plans of a step may run out of time."""

    def __init__(self, load: float = 1.0, seen: list[tuple[int, float]] | None = None, is_late: bool = False) -> None:
        self.load, self.is_late = load, is_late
        self.seen: list[tuple[int, float]] = [] if seen is None else seen

    def with_expert_imbalance(self, load: float) -> Noting:
        return Noting(load, self.seen, self.is_late)

    def __call__(self, lengths: Sequence[int], should_stop: Callable[[], bool] | None = None) -> StepPlan:
        if self.is_late:
            raise OutOfTime
        self.seen.append((sum(lengths), self.load))
        return plan_naive(lengths, 2, 100)

    def fallback(self, lengths: Sequence[int]) -> StepPlan:
        self.seen.append((sum(lengths), -self.load))
        return plan_naive(lengths, 2, 100)


def loader_of(planner: Any, ahead: int, loads: LoadHistory | None, seconds: float | None = None) -> StepLoader:
    """Return a loader of 12 steps with one sample each, of 1, 2, ... tokens; the first is step 5."""
    settings = LoaderSettings(0, samples_per_step=1, plan_ahead=ahead, first_step=5)
    source = MemorySource(list(range(1, 13)))
    return StepLoader(source, PlanMaker(planner, None, seconds), settings, loads=loads)


@pytest.mark.parametrize("ahead", [1, 2, 4])
def test_steps_made_ahead_count_with_what_all_ranks_know(ahead: int) -> None:
    """Plans are equal for a rank that adds late, and for a rank whose thread waits for the training."""
    seen = []
    for waits in (False, True):
        planner, history = Noting(), LoadHistory.planned_ahead(ahead)
        loader, made = loader_of(planner, ahead, history), threading.Event()
        for step in loader:
            if waits:
                made.wait(0.01)  # the thread makes as many steps as it may
            history.add(step.step_index, float(10 * step.step_index))
        loader.close()
        seen.append(planner.seen)
    assert seen[0] == seen[1]
    expected = [1.0] * (ahead + 1)
    for step in range(5 + ahead + 1, 17):
        known = range(max(5, step - ahead - WINDOW), step - ahead)
        expected.append(10.0 * sum(known) / len(known))
    assert seen[0] == [(number + 1, load) for number, load in enumerate(expected)]


def test_the_simple_plan_counts_with_the_same_load() -> None:
    history = LoadHistory.planned_ahead(1)
    planner = Noting()
    loader = loader_of(planner, 1, history)
    steps = []
    for step in loader:
        history.add(step.step_index, 2.0)
        steps.append(step)
    loader.simple_step(steps[1])
    loader.simple_step(steps[2])
    assert planner.seen[-2:] == [(2, -1.0), (3, -2.0)]


def test_without_a_history_planners_are_asked_for_no_load() -> None:
    class Plain:
        def __call__(self, lengths: Sequence[int], should_stop: Callable[[], bool] | None = None) -> StepPlan:
            return plan_naive(lengths, 2, 100)

        def fallback(self, lengths: Sequence[int]) -> StepPlan:
            raise AssertionError

    assert next(loader_of(Plain(), 2, None)).num_tokens == 1
    assert next(loader_of(Plain(), 2, LoadHistory(3))).num_tokens == 1
    with pytest.raises(AssertionError, match=r"load=2\.0"):
        PlanMaker(Plain()).with_expert_imbalance(2.0)
