"""Plans of a recording: one rank plans, and all ranks get the same plan."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from bytescale_ext.plan.step.plan import StepPlan
from bytescale_ext.plan.step.sizes import Cluster
from scripts.bench.cluster.hybrid import HybridPlanner
from scripts.bench.cluster.virtual.planned_once import PlannedOnce

LENGTHS = (40, 7, 7, 20, 3, 3, 3, 3)


class Counted:
    """A planner that counts its calls, from any thread."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, ...]] = []
        self.planner = HybridPlanner(Cluster(4, 16))

    def __call__(self, lengths: Sequence[int], should_stop: Callable[[], bool] | None = None) -> StepPlan:
        self.calls.append(tuple(lengths))
        time.sleep(0.05)  # the other threads come in, if they can
        if sum(lengths) > 100:
            raise ValueError("too long")
        return self.planner(lengths)

    def fallback(self, lengths: Sequence[int]) -> StepPlan:
        return self.planner(lengths)


def test_one_rank_plans_for_all(tmp_path: Path) -> None:
    planner, plans = Counted(), []
    ranks = [PlannedOnce(planner, tmp_path) for _ in range(4)]
    threads = [threading.Thread(target=lambda rank=rank: plans.append(rank(LENGTHS))) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert planner.calls == [LENGTHS]
    expected = planner.planner(LENGTHS)
    assert [plan.to_json() for plan in plans] == [expected.to_json()] * 4
    ranks[0]((7, 7, 7, 7))
    assert planner.calls == [LENGTHS, (7, 7, 7, 7)]


def test_every_rank_gets_the_error_of_the_planner(tmp_path: Path) -> None:
    planner = Counted()
    for rank in (PlannedOnce(planner, tmp_path), PlannedOnce(planner, tmp_path)):
        with pytest.raises(ValueError, match="too long"):
            rank((90, 90))
    assert len(planner.calls) == 2
    assert not list(tmp_path.iterdir())
