"""The step after the running step, before ``next()`` returns it."""

from __future__ import annotations

import random
import threading
import time

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


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_threads_that_look_ahead_together_see_one_step(num_threads: int) -> None:
    """Every look-ahead sees the step that comes next; no step is lost, repeated or waited for twice."""
    lengths = LENGTHS * 5
    steps, draw, found = loader(MemorySource(lengths), plan_ahead=1), random.Random(0), []
    for number in range(len(lengths) // 4):
        seen: list[object] = []

        def look(seconds: float, seen: list[object] = seen) -> None:
            time.sleep(seconds)
            seen.append(steps.peek())

        delays = [draw.random() * 2e-3 for _ in range(num_threads)]
        threads = [threading.Thread(target=look, args=(seconds,), daemon=True) for seconds in delays]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        step = next(steps)
        found += step.sample_ids
        assert [ahead.step_index for ahead in seen] == [number] * num_threads
    assert found == list(range(len(lengths)))


def test_a_step_is_peeked_while_another_thread_takes_one() -> None:
    """Each step arrives once, whichever call takes it from the queue."""
    lengths = LENGTHS * 5
    steps, stop = loader(MemorySource(lengths), plan_ahead=1), threading.Event()

    def look() -> None:
        while not stop.is_set():
            steps.peek()

    threads = [threading.Thread(target=look, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    found = [number for step in steps for number in step.sample_ids]
    stop.set()
    for thread in threads:
        thread.join(60)
    assert found == list(range(len(lengths)))
