"""Planning under a time limit: planners ask now and then whether to stop."""

from __future__ import annotations

from collections.abc import Callable

from bytescale_ext.errors import OutOfTime

ShouldStop = Callable[[], bool] | None
"""A planner calls it now and then and gives up once it returns True; None: no limit."""


def stop_if(should_stop: ShouldStop) -> None:
    """Raise OutOfTime when ``should_stop`` returns True."""
    if should_stop is not None and should_stop():
        raise OutOfTime("the planner ran out of time")
