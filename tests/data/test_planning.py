from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from bytescale_ext.data import planning
from bytescale_ext.data.planning import plan_in_time
from bytescale_ext.errors import OutOfTime
from bytescale_ext.plan.cost import CostModel, StageCost
from bytescale_ext.plan.planner import HdpPlanner
from bytescale_ext.plan.shapes import StepPlan


class Clock:
    """Every look at it is a second later."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += 1.0
        return self.now


class Patient:
    """Asks ``looks`` times whether to stop, then has a plan of two ranks; its simple plan has one."""

    def __init__(self, looks: int) -> None:
        self.looks = looks
        self.was_limited = False

    def __call__(self, lengths: Sequence[int], should_stop: Callable[[], bool] | None = None) -> StepPlan:
        self.was_limited = should_stop is not None
        for _ in range(self.looks):
            if should_stop is not None and should_stop():
                raise OutOfTime("the time is over")
        return StepPlan(2, 8, tuple(lengths), ((), ()))

    def fallback(self, lengths: Sequence[int]) -> StepPlan:
        return StepPlan(1, 8, tuple(lengths), ((),))


@pytest.mark.parametrize(("looks", "seconds", "num_ranks"), [(5, 5.0, 2), (6, 5.0, 1), (0, 0.5, 2), (1, 0.5, 1)])
def test_the_simple_plan_is_taken_when_time_is_over(
    monkeypatch: pytest.MonkeyPatch, looks: int, seconds: float, num_ranks: int
) -> None:
    monkeypatch.setattr(planning, "time", Clock())
    plan, fell_back = plan_in_time(Patient(looks), (3, 4), seconds)
    assert (plan.num_ranks, fell_back, plan.lengths) == (num_ranks, num_ranks == 1, (3, 4))


def test_without_a_limit_nobody_looks_at_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(planning, "time", clock)
    planner = Patient(10_000)
    assert plan_in_time(planner, (1,), None)[1] is False
    assert not planner.was_limited and clock.now == 0


def test_other_errors_are_not_taken_for_lack_of_time() -> None:
    class Broken(Patient):
        def __call__(self, lengths: Sequence[int], should_stop: Callable[[], bool] | None = None) -> StepPlan:
            raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        plan_in_time(Broken(0), (1,), 1.0)


@pytest.mark.parametrize("balance", ["none", "dp", "pp", "bytescale"])
def test_every_planner_stops_and_has_a_simple_plan(monkeypatch: pytest.MonkeyPatch, balance: str) -> None:
    cost = CostModel(a=0.01, b=1.0)
    planner = HdpPlanner(4, 64, StageCost(cost, cost), balance=balance, num_stages=2 if balance == "pp" else 1)
    lengths = (*[200, 130] * 10, *[9] * 40)
    monkeypatch.setattr(planning, "time", Clock())
    plan, fell_back = plan_in_time(planner, lengths, 0.5)
    assert plan.ranks == (planner.fallback(lengths) if fell_back else planner(lengths)).ranks
    assert fell_back == (balance != "none")  # the simple plan is what "none" makes
