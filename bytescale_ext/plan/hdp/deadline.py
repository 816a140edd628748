"""Planning under a time limit: planners ask regularly whether to stop."""

from __future__ import annotations

from collections.abc import Callable

from bytescale_ext.errors import OutOfTime

ShouldStop = Callable[[], bool] | None
"""A function that a planner calls regularly, and that returns True once the planner has to give up; None: no limit."""


def stop_if(should_stop: ShouldStop) -> None:
    """Raise OutOfTime if ``should_stop`` returns True."""
    if should_stop is not None and should_stop():
        raise OutOfTime("the planner ran out of time")
