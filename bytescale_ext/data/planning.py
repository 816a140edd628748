"""One plan of a step, in the time that it may take."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from bytescale_ext.errors import OutOfTime
from bytescale_ext.plan.shapes import StepPlan


class Planner(Protocol):
    """From the lengths of a step to its plan: pure, equal on every rank (``plan.planner.HdpPlanner``)."""

    def __call__(self, lengths: Sequence[int], should_stop: Callable[[], bool] | None = None) -> StepPlan:
        """The plan; raises ``OutOfTime`` soon after ``should_stop`` says so."""
        ...

    def fallback(self, lengths: Sequence[int]) -> StepPlan:
        """A simple plan of the same sequences, made at once."""
        ...


def plan_in_time(planner: Planner, lengths: tuple[int, ...], plan_seconds: float | None) -> tuple[StepPlan, bool]:
    """The plan, and whether it is the simple one because the planner ran out of its time (None: no limit)."""
    if plan_seconds is None:
        return planner(lengths), False
    deadline = time.perf_counter() + plan_seconds
    try:
        return planner(lengths, lambda: time.perf_counter() > deadline), False
    except OutOfTime:
        return planner.fallback(lengths), True
