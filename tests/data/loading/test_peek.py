"""The step after the running step, before ``next()`` returns it."""

from __future__ import annotations

import pytest

from bytescale_ext.errors import PlanError
from tests.data.loading.test_loader import LENGTHS
from tests.data.loading.test_loader import _fails_at as fails_at
from tests.data.loading.test_loader import _key as key
from tests.data.loading.test_loader import _loader as loader
from tests.data.sources import MemorySource


def test_a_peek_hands_out_nothing() -> None:
    whole = [key(step) for step in loader(MemorySource(LENGTHS))]
    steps, found = loader(MemorySource(LENGTHS), plan_ahead=1), []
    state = steps.state_dict()
    while (ahead := steps.peek()) is not None:
        assert steps.peek() is ahead
        assert steps.state_dict() == state
        found.append(key(next(steps)))
        state = steps.state_dict()
        assert found[-1] == key(ahead)
    assert found == whole
    assert next(steps, None) is None
    steps.load_state_dict({"consumed_samples": 0, "step_index": 0})
    assert key(next(steps)) == whole[0]


def test_a_peek_meets_the_error_that_the_next_step_raises() -> None:
    steps = loader(MemorySource(LENGTHS), planner=fails_at(1, PlanError("bad plan")))
    next(steps)
    assert steps.peek() is None
    with pytest.raises(PlanError, match="bad plan"):
        next(steps)
