"""Bound on pipelines by linear programs: exact in known cases, and below every plan."""

from __future__ import annotations

import numpy as np
import pytest

from bytescale_ext.plan.cost.cost_model import CostModel, StageCost
from bytescale_ext.plan.evaluate.length_samplers import sample_lengths
from bytescale_ext.plan.evaluate.pipeline_limit import least_time, pipeline_limit
from bytescale_ext.plan.evaluate.replay import replay_stages
from bytescale_ext.plan.hdp.planner import HdpPlanner
from bytescale_ext.plan.hdp.table import PLANNERS
from bytescale_ext.plan.schedule.actions import seq1f1b_schedule
from bytescale_ext.plan.step.sizes import Cluster

COST = StageCost(CostModel(4e-8, 1.6e-3), CostModel(1e-7, 3.2e-3))


def one_pipeline(sizes: list[tuple[float, float]], num_stages: int) -> float:
    """Return the 1F1B time of slots of (forward, backward) seconds, by relaxation of start times."""
    ends: dict[tuple[str, int, int], float] = {}
    for _ in range(2 * len(sizes) * num_stages + 2):
        for stage, actions in enumerate(seq1f1b_schedule(num_stages, len(sizes)).stages):
            ready = 0.0
            for action in actions:
                slot = action.micro_batch
                if action.kind == "F":
                    cause = ends.get(("F", stage - 1, slot), 0.0)
                else:
                    last = stage == num_stages - 1
                    cause = ends.get(("F", stage, slot) if last else ("B", stage + 1, slot), 0.0)
                ready = max(ready, cause) + sizes[slot][action.kind == "B"]
                ends[action.kind, stage, slot] = ready
    return max(ends.values())


@pytest.mark.parametrize("num_stages", [2, 4])
def test_a_slot_alone_goes_through_all_stages(num_stages: int) -> None:
    assert least_time(num_stages, 1.0, 0.7, num_slots=4) == pytest.approx(num_stages)


@pytest.mark.parametrize("seed", range(6))
def test_no_sequence_of_slots_is_faster(seed: int) -> None:
    random = np.random.default_rng(seed)
    num_stages, num_slots = int(random.integers(2, 5)), 6
    forward = random.uniform(0.05, 0.25, num_slots)
    tall = int(random.integers(num_slots))
    backward = forward * random.uniform(2.0, 2.5, num_slots)
    forward[tall], backward[tall] = 0.3, 0.7
    sizes = list(zip(forward.tolist(), backward.tolist(), strict=True))
    total = float((forward + backward).sum())
    assert least_time(num_stages, total, 0.7, num_slots) <= one_pipeline(sizes, num_stages) * (1 + 1e-9)


def test_more_work_and_more_slots() -> None:
    times = [least_time(3, total, 0.7, num_slots=6) for total in (1.0, 2.0, 4.0)]
    assert times == sorted(times)
    assert times[0] < times[-1]
    assert least_time(3, 3.0, 0.7, num_slots=8) <= least_time(3, 3.0, 0.7, num_slots=5) + 1e-9


@pytest.mark.parametrize("sampler", ["byted", "github"])
@pytest.mark.slow
def test_no_plan_is_below_the_limit(sampler: str) -> None:
    lengths = sample_lengths(sampler, 1 << 16, 1 << 19, 3).tolist()
    limit = pipeline_limit(lengths, Cluster(8, 8192), COST, 2)
    assert -(-max(lengths) // 8192) <= limit.width <= 8
    for balance in (row.name for row in PLANNERS if row.aligned):
        plan = HdpPlanner(Cluster(8, 8192), (COST,) * 2, balance=balance, aligned=True)(lengths)
        assert limit.seconds <= replay_stages(plan, (COST, COST)).makespan
    sizes = np.array(lengths, dtype=float)
    assert limit.seconds >= COST.both.sequence_cost(sizes, np.ones(len(sizes))).sum() / 8 * (1 - 1e-3)
