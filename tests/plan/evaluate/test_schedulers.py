from __future__ import annotations

import numpy as np
import pytest

from bytescale_ext.plan.cost.cost_model import CostModel, StageCost
from bytescale_ext.plan.cost.model_cost import ModelCost
from bytescale_ext.plan.cost.model_shape import LLAMA_7B
from bytescale_ext.plan.cost.shards import ShardTable
from bytescale_ext.plan.evaluate.bounds import lower_bounds
from bytescale_ext.plan.evaluate.length_samplers import sample_lengths
from bytescale_ext.plan.evaluate.replay import replay, replay_stages
from bytescale_ext.plan.evaluate.schedulers import (
    NotApplicable,
    Scenario,
    ours,
    planned_by,
    run_groups,
    schedulers,
    static,
)
from bytescale_ext.plan.hdp.planner import HdpPlanner
from bytescale_ext.plan.hdp.table import PLANNERS
from bytescale_ext.plan.memory.stage_memory import LayerBytes, StageMemory
from bytescale_ext.plan.setup.choose import choose
from bytescale_ext.plan.setup.planner import scenario_of
from bytescale_ext.plan.setup.setup import setup_of_cost
from bytescale_ext.plan.step.plan import StepPlan
from bytescale_ext.plan.step.sizes import Cluster
from tests.plan.simple_plans import plan_naive, plan_static

UNALIGNED = [row.name for row in PLANNERS if not row.aligned]
LAYER = CostModel(a=4.17e-11, b=1.6e-6, c=1.83e-7, g=1e-4)
MODEL = ModelCost(LLAMA_7B, "a GPU", "bfloat16", 1, "test", LAYER, LAYER.scaled(2.0), 1e-6, 2e-6, 1.0, 1.0)
UNIT = StageCost(CostModel(a=0.0, b=1.0, g=1.0), CostModel(a=0.0, b=2.0, g=1.0))


def scenario(num_ranks: int, tokens_per_rank: int, context: int, *stages: StageCost) -> Scenario:
    count = max(1, len(stages))
    memory = StageMemory(LayerBytes(2.0, 1.0, 2.0), (3,) * count, (60.0,) * count, (40.0,) * count)
    planner = HdpPlanner(Cluster(num_ranks, tokens_per_rank), stages or (UNIT,), balance="none")
    return Scenario(context, stages or (UNIT,), memory, planner)


def test_static_by_hand() -> None:
    """Context 16 with C = 8 needs 2 ranks. Packs of 16 tokens in order are [10, 4], [14], [5, 3, 2] on two groups."""
    outcome = static([10, 4, 14, 5, 3, 2], scenario(4, 8, 16))
    assert outcome.makespan == 3 * (7 + 6) + 2 * 2  # group 0: the first pack of 7 and the third of 3 + 2 + 1 tokens
    assert (outcome.forwards_per_rank, outcome.peak_tokens, outcome.distinct_peers) == (2, 7, 1)
    assert outcome.device_bytes == 100 + 3 * 2 * 7
    assert outcome.idle_share == pytest.approx(1 - (43 + 23) / 86)
    assert outcome.exposed_communication == 0


def test_static_runs_equal_counts_with_pipelines() -> None:
    """Group 1 has one pack and an empty micro-batch."""
    outcome = static([10, 4, 14, 5, 3, 2], scenario(4, 8, 16, UNIT, UNIT))
    table = ShardTable.of(plan_static([16, 16, 16], 2, 16, 1))
    assert outcome.forwards_per_rank == 2
    assert table.counts.tolist() == [2, 1]
    own = 2 * (43 + 23 + 2)
    assert outcome.idle_share == pytest.approx(1 - own / (4 * outcome.makespan))


def test_static_needs_ranks_that_divide() -> None:
    with pytest.raises(NotApplicable, match="context parallelism of 4 does not divide 6 ranks"):
        static([4], scenario(6, 8, 30))


def test_groups_wait_for_each_other_and_pay_for_each_sample() -> None:
    """Group 0 has sequence 0 on ranks 0-1, 1 and 2 on rank 2. Group 1 has sequence 3 on rank 2, 4 on 0, 5 on 1."""
    lengths = [8, 3, 3, 9, 1, 2]
    groups = [[[0], [0], [1, 2]], [[4], [5], [3]]]
    outcome = run_groups(groups, lengths, scenario(3, 16, 16), 0.25)
    assert outcome.makespan == (3 * 6 + 4) + (3 * 9 + 2)
    own = 3 * sum(lengths) + 2 * 7
    assert outcome.idle_share == pytest.approx(1 - own / (3 * outcome.makespan))
    assert (outcome.forwards_per_rank, outcome.peak_tokens, outcome.distinct_peers) == (3, 9, 1)
    assert outcome.device_bytes == 100 + 3 * 2 * 9
    assert outcome.planning_seconds == 0.25


@pytest.mark.parametrize("num_stages", [1, 4])
@pytest.mark.parametrize("name", [*schedulers()])
def test_no_scheduler_beats_the_bound(name: str, num_stages: int) -> None:
    lengths = sample_lengths("byted", 1 << 16, 1 << 20, seed=1).tolist()
    here = scenario_of(choose(setup_of_cost(MODEL, num_stages, Cluster(16, 8192), 1 << 16)))
    if num_stages > 1 and name in UNALIGNED:
        with pytest.raises(NotApplicable, match=f"{name} does not align slots"):
            schedulers()[name](lengths, here)
        return
    outcome = schedulers()[name](lengths, here)
    bounds = lower_bounds(lengths, Cluster(16, 8192), here.stages)
    assert outcome.makespan >= bounds.largest
    assert 0 <= outcome.idle_share < 1
    assert 0 <= outcome.exposed_communication < 1
    assert outcome.peak_tokens <= 8192 * num_stages
    assert outcome.planning_seconds >= 0
    if name != "static":
        assert outcome.distinct_peers <= 4


def test_ours_is_near_the_bound_and_naive_is_not() -> None:
    lengths = sample_lengths("byted", 1 << 18, 4 << 20, seed=0).tolist()
    here = scenario_of(choose(setup_of_cost(MODEL, 1, Cluster(64, 8192), 1 << 18)))
    bound = lower_bounds(lengths, Cluster(64, 8192), here.stages).largest
    assert ours(lengths, here).makespan <= 1.05 * bound
    assert planned_by("none")(lengths, here).makespan >= 1.2 * bound


def test_the_table_is_the_plan() -> None:
    """Arrays and micro-batches give the same table, costs, coupled groups and replay."""
    lengths = sample_lengths("byted", 1 << 16, 1 << 20, seed=2).tolist()
    plan = plan_naive(lengths, 16, 8192)
    kept = StepPlan(16, 8192, plan.lengths, tuple(tuple(rank) for rank in plan.ranks))
    one, other = ShardTable.of(plan), ShardTable.of(kept)
    assert one.counts.tolist() == other.counts.tolist() == [len(rank) for rank in kept.ranks]
    assert np.allclose(one.row_costs(LAYER), other.row_costs(LAYER))
    costs = [LAYER.micro_batch_cost(micro_batch, lengths) for rank in kept.ranks for micro_batch in rank]
    assert np.allclose(one.row_costs(LAYER), costs)
    assert one.row_groups.tolist() == other.row_groups.tolist()
    assert one.row_tokens.tolist() == [micro_batch.num_tokens for rank in kept.ranks for micro_batch in rank]
    assert replay(plan, LAYER) == replay(kept, LAYER)
    stage = StageCost(LAYER, LAYER)
    assert replay_stages(plan, [stage]).makespan == pytest.approx(replay_stages(kept, [stage]).makespan)
