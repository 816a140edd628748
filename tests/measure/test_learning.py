"""Learning while training: which passes count, and from which step on plans use new costs."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from bytescale_ext.measure.learning import (
    EVERY,
    FIRST_STEP,
    CostLearner,
    MeasuredPass,
    is_agreed,
    learned_line,
    learner_of_state,
    state_of,
)
from bytescale_ext.plan.cost.cost_model import CostModel, StageCost
from bytescale_ext.plan.cost.learned import KINDS, LearnedCosts, Learner, Statistics
from bytescale_ext.plan.hdp.planner import HdpPlanner
from bytescale_ext.plan.step.plan import StepPlan
from bytescale_ext.plan.step.sizes import Cluster

STAGE = StageCost(CostModel(a=1e-9, b=1e-6, c=1e-7, g=1e-5), CostModel(a=2e-9, b=2e-6, c=2e-7, g=1e-5))


def plan_of() -> StepPlan:
    """Return the plan of a ring over both ranks and of short documents."""
    return HdpPlanner(Cluster(2, 1000), (STAGE,))((1900, 900, 800, 700, 600, 500, 400))


def warm_learner(rank: int = 0, plan_ahead: int = 2) -> CostLearner:
    """Return a learner whose next step counts."""
    learner = CostLearner(STAGE, Learner.new(2), rank, plan_ahead)
    for _ in range(FIRST_STEP - 1):
        learner.add(plan_of(), [MeasuredPass(0, True, 1.0)])
    return learner


def counts_of(learner: CostLearner) -> float:
    return float(Statistics.none(2).with_vector(learner.take()).counts.sum())


def test_passes_count() -> None:
    plan, learner = plan_of(), warm_learner()
    assert counts_of(learner) == 0, "the first steps are slow"
    count = len(plan.ranks[0])
    rings = [any(len(shard.ring) > 1 for shard in batch.shards) for batch in plan.ranks[0]]
    assert any(rings)
    assert not all(rings)
    passes = [MeasuredPass(index, way, 1e-3) for index in range(count) for way in (False, True)]
    learner.add(plan, passes)
    alone_forwards = sum(not ring and index > 0 for index, ring in enumerate(rings))
    assert counts_of(learner) == count + alone_forwards
    learner.add(plan, passes, num_slices=2)
    assert counts_of(learner) == rings.count(False) + alone_forwards


@pytest.mark.parametrize("seconds", [float("nan"), -1.0, 0.0, float("inf"), 1e3])
def test_a_clock_that_jumps_is_left_out(seconds: float) -> None:
    plan, learner = plan_of(), warm_learner()
    index = len(plan.ranks[0]) - 1
    learner.add(plan, [MeasuredPass(index, True, 1e-3)] * 9 + [MeasuredPass(index, True, seconds)])
    assert counts_of(learner) == 9
    learner.add(plan, [MeasuredPass(99, True, 1e-3)])
    assert counts_of(learner) == 0, "a micro-batch that the plan does not have"


@pytest.mark.parametrize("plan_ahead", [1, 2, 6])
def test_plans_that_are_made_keep_their_costs(plan_ahead: int) -> None:
    learner = warm_learner(plan_ahead=plan_ahead)
    statistics = Statistics.none(2)
    statistics.rank_work[0] = 1.0
    seen = []
    for step in range(6):
        statistics.rank_seconds[0] = [5.0, 5.0 * (step + 2)]
        costs = learner.adopt(statistics.to_vector(), step)
        assert costs is not None
        seen.append(costs)
        for other in range(step + plan_ahead + 1, step + plan_ahead + 3):
            assert learner.at(other) == costs, "no rank has planned these steps"
        earlier = step - 1
        if earlier >= 0:
            assert learner.at(step + plan_ahead) == seen[earlier]
        assert learner.at(step + 1) == (seen[step - plan_ahead] if step >= plan_ahead else LearnedCosts())


def test_exchanges_are_agreed() -> None:
    assert [step for step in range(3 * EVERY) if is_agreed(step)] == [EVERY - 1, 2 * EVERY - 1, 3 * EVERY - 1]


def test_a_checkpoint_continues() -> None:
    statistics = Statistics.none(2)
    statistics.squares[0, 0, 0] = 3.0
    learner = Learner(LearnedCosts((1.0, 2.0, 3.0, 4.0, 5.0), (1.0, 0.5)), statistics, 2.0, is_settling=True)
    state = json.loads(json.dumps(state_of(learner, "H100")))
    again, text = learner_of_state(state, Learner.new(2), "H100")
    assert (again.costs, again.scale, again.is_settling, text) == (learner.costs, 2.0, True, "")
    assert (again.statistics.to_vector() == statistics.to_vector()).all()
    for fresh, hardware in ((Learner.new(3), "H100"), (Learner.new(2), "A100")):
        again, text = learner_of_state(state, fresh, hardware)
        assert again.costs == LearnedCosts(learner.costs.factors), "speeds belong to ranks"
        assert "speeds of ranks are dropped" in text


def test_a_checkpoint_continues_the_speeds_of_stages() -> None:
    costs = LearnedCosts(speeds=(1.0, 0.5), stage_speeds=((1.0, 1.0), (1.0, 0.5)))
    state = json.loads(json.dumps(state_of(Learner.new(2, 2, costs), "H100")))
    assert learner_of_state(state, Learner.new(2, 2), "H100")[0].costs == costs
    del state["stage_speeds"]
    assert learner_of_state(state, Learner.new(2, 2), "H100")[0].costs == replace(costs, stage_speeds=())


@pytest.mark.parametrize(
    "change",
    [
        {"factors": [1.0]},
        {"factors": [1.0, 1.0, 1.0, 1.0, -1.0]},
        {"scale": float("nan")},
        {"sums": "x"},
        {"speeds": None},
        {"stage_speeds": [[float("inf")]]},
        {"stage_speeds": 1.0},
    ],
)
def test_a_damaged_checkpoint_is_dropped(change: dict[str, object]) -> None:
    fresh = Learner.new(2)
    again, text = learner_of_state({**state_of(fresh, "CPU"), **change}, fresh, "CPU")
    assert again is fresh
    assert "damaged" in text


def test_the_log_names_slow_ranks() -> None:
    line = learned_line(LearnedCosts((2.0, 1.0, 1.0, 1.0, 0.333333), (1.0, 0.5, 1.0)))
    assert "attention x 2, linear x 1" in line
    assert "rank 1 at 0.5" in line
    assert "all ranks equally fast" in learned_line(LearnedCosts())
    assert len(LearnedCosts().factors) == len(KINDS)
    assert np.isfinite(Learner.new(2).statistics.to_vector()).all()
