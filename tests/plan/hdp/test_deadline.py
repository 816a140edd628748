"""Planners stop when they are asked to."""

from __future__ import annotations

import pytest

from bytescale_ext.errors import OutOfTime
from bytescale_ext.plan.hdp.deadline import stop_if


def test_no_limit_never_stops() -> None:
    stop_if(None)
    stop_if(lambda: False)


def test_a_planner_out_of_time_raises() -> None:
    answers = iter((False, False, True))
    stop_if(lambda: next(answers))
    stop_if(lambda: next(answers))
    with pytest.raises(OutOfTime, match="ran out of time"):
        stop_if(lambda: next(answers))
