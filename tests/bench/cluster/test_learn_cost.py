"""The cost of learning, on few ranks."""

from __future__ import annotations

import pytest

from scripts.bench.cluster.learn_cost import cost_of_learning, fake_group


def test_learning_takes_a_small_part_of_a_step() -> None:
    with fake_group(16):
        found = cost_of_learning(16, 12)
    assert 0 < found["share"] < 0.01, "a step takes seconds, learning a few milliseconds"
    assert found["share"] * found["step_seconds"] * 1e3 == pytest.approx(found["learning_ms"])
