"""Plans with pipelines: the replay against a slow replay, and the effect of aligned slots."""

from __future__ import annotations

import numpy as np
import pytest

from bytescale_ext.plan.cost.cost_model import CostModel, StageCost
from bytescale_ext.plan.cost.shards import ShardTable
from bytescale_ext.plan.evaluate.replay import BACKWARD, FORWARD, replay_stages
from bytescale_ext.plan.hdp.planner import HdpPlanner
from bytescale_ext.plan.hdp.table import PLANNERS
from bytescale_ext.plan.step.micro_batch import MicroBatch, Shard, zigzag_ranges
from bytescale_ext.plan.step.placed import micro_batch_counts
from bytescale_ext.plan.step.plan import StepPlan
from bytescale_ext.plan.step.sizes import Cluster, Slicing
from tests.plan.hdp.aligned.random_plans import random_plan, slow_makespan

STAGE = StageCost(CostModel(a=0.01, b=1.0, c=0.3, g=2.0), CostModel(a=0.025, b=2.0, c=0.6, g=2.0))
HEAD = StageCost(CostModel(a=0.01, b=1.5, c=0.3, g=2.0), CostModel(a=0.025, b=3.0, c=0.6, g=2.0))
UNIT = StageCost(CostModel(a=0.0, b=1.0), CostModel(a=0.0, b=2.0))


def locals_plan(*tokens_of_ranks: tuple[int, ...]) -> StepPlan:
    lengths = tuple(tokens for rank in tokens_of_ranks for tokens in rank)
    numbers = iter(range(len(lengths)))
    ranks = tuple(
        tuple(MicroBatch((Shard(next(numbers), ((0, tokens),), (rank,)),)) for tokens in row)
        for rank, row in enumerate(tokens_of_ranks)
    )
    return StepPlan(len(ranks), 64, lengths, ranks, aligned=True)


def test_uniform_micro_batches_by_hand() -> None:
    """The textbook formula is (m + p - 1) (f + b) for m equal micro-batches."""
    result = replay_stages(locals_plan((4,) * 6), [UNIT] * 4)
    assert result.makespan == (6 + 4 - 1) * (4.0 + 8.0)
    assert result.idle_share == pytest.approx(3 / 9)
    assert result.starts[0, FORWARD].tolist() == [0.0, 4.0, 8.0, 12.0]
    assert result.stops[5, BACKWARD, 0] == result.makespan


def test_uniform_slices_by_hand() -> None:
    """The textbook formula with slices is (m + (p - 1) / k) (f + b)."""
    result = replay_stages(locals_plan((4,) * 6), [UNIT] * 4, Slicing(4))
    assert result.makespan == (6 + 3 / 4) * (4.0 + 8.0)
    assert result.starts.shape == (24, 2, 4)
    assert result.starts[:5, FORWARD, 0].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert result.starts[3, BACKWARD, 3] < result.starts[0, BACKWARD, 3]  # the last slice runs backward first


def test_messages_of_unequal_boundaries_by_hand() -> None:
    """Forwards take 1 s, backwards 2 s, messages 1 s to and from the first stage, and 5 s to and from the last."""
    result = replay_stages(locals_plan((1, 1)), [UNIT] * 3, p2p_seconds=np.array([1.0, 5.0]))
    assert result.starts[:, FORWARD].tolist() == [[0.0, 2.0, 8.0], [1.0, 3.0, 11.0]]
    assert result.starts[:, BACKWARD].tolist() == [[19.0, 16.0, 9.0], [22.0, 19.0, 12.0]]
    assert result.makespan == 24.0


def test_messages_of_a_ring_wait_for_its_slowest_boundary() -> None:
    """A document on two pipelines: the first is slow after its first stage, the second after its second stage."""
    ranks = tuple((MicroBatch((Shard(0, zigzag_ranges(8, 2, rank), (0, 1)),)),) for rank in range(2))
    plan = StepPlan(2, 64, (8,), ranks, aligned=True)
    result = replay_stages(plan, [UNIT] * 3, p2p_seconds=np.array([[5.0, 1.0], [2.0, 3.0]]))
    assert result.makespan == 3 * (4.0 + 8.0) + 2 * (5.0 + 3.0)


def test_stage_costs_must_fill_the_chunks() -> None:
    with pytest.raises(ValueError, match="3 stage costs are not a multiple of 2 model chunks"):
        replay_stages(locals_plan((4,)), [UNIT] * 3, num_chunks=2)
    with pytest.raises(ValueError, match="2 slices with 2 model chunks"):
        replay_stages(locals_plan((4,)), [UNIT] * 4, Slicing(2), num_chunks=2)


@pytest.mark.parametrize(
    ("num_stages", "num_chunks", "num_slices"), [(1, 1, 1), (2, 1, 1), (3, 1, 1), (2, 2, 1), (2, 1, 2), (3, 1, 3)]
)
def test_against_the_slow_replay(num_stages: int, num_chunks: int, num_slices: int) -> None:
    random = np.random.default_rng(num_stages * 10 + num_chunks)
    stages = [STAGE] * (num_stages * num_chunks - 1) + [HEAD]
    for _ in range(15):
        plan = random_plan(random, int(random.integers(1, 6)), int(random.integers(1, 6)))
        counts = np.array(micro_batch_counts(plan, multiple=num_stages if num_chunks > 1 else 1))
        table = ShardTable.of(plan).with_counts(counts)
        padded = [
            (*row, *(MicroBatch(()),) * (count - len(row))) for row, count in zip(plan.ranks, counts, strict=True)
        ]
        slow = StepPlan(plan.num_ranks, 64, plan.lengths, padded, aligned=True)
        makespan = replay_stages(table, stages, Slicing(num_slices), num_chunks).makespan
        assert makespan == pytest.approx(slow_makespan(slow, stages, num_chunks, num_slices))


@pytest.mark.slow
def test_random_aligned_plans_never_deadlock() -> None:
    random = np.random.default_rng(7)
    for _ in range(400):
        plan = random_plan(random, int(random.integers(2, 7)), int(random.integers(2, 9)))
        num_stages, num_slices = int(random.integers(2, 6)), int(random.choice([1, 1, 2, 3, 5]))
        result = replay_stages(plan, [STAGE] * num_stages, Slicing(num_slices, eager=bool(random.integers(2))))
        assert (result.makespan > 0) == bool(plan.lengths)
        assert len(result.starts) == result.counts.sum() * num_slices


@pytest.mark.slow
def test_virtual_stages_need_whole_groups_and_do_not_deadlock() -> None:
    random = np.random.default_rng(8)
    for _ in range(200):
        plan = random_plan(random, int(random.integers(2, 7)), int(random.integers(2, 9)))
        num_stages = int(random.integers(2, 4))
        table = ShardTable.of(plan).with_counts(np.array(micro_batch_counts(plan, multiple=num_stages)))
        result = replay_stages(table, [STAGE] * (num_stages * 2), num_chunks=2)
        assert result.starts.shape == (table.num_rows, 2, num_stages * 2)


@pytest.mark.slow
def test_slots_that_are_not_aligned_do_deadlock() -> None:
    """All ranks have the same rings in the same order, without empty slots."""
    random = np.random.default_rng(9)
    stuck = []
    for _ in range(200):
        plan = random_plan(random, 5, 8, aligned=False)
        try:
            replay_stages(plan, [STAGE] * 4)
        except ValueError:
            stuck.append(plan)
    assert len(stuck) > 50
    assert all(slow_makespan(plan, [STAGE] * 4) == -1.0 for plan in stuck[:10])


def test_the_smallest_deadlock() -> None:
    """Stage 0 of rank 0 runs the ring as its second forward pass.

    On rank 1 it comes after the first backward, which waits.
    """
    ring = [MicroBatch((Shard(0, zigzag_ranges(8, 2, member), (0, 1)),)) for member in (0, 1)]
    first, *rest = (MicroBatch((Shard(seq, ((0, 4),), (1,)),)) for seq in (1, 2))
    lengths = (8, 4, 4)
    broken = StepPlan(2, 8, lengths, ((ring[0],), (first, *rest, ring[1])))
    assert replay_stages(broken, [UNIT]).makespan > 0  # without pipelines the same order is enough
    assert replay_stages(broken, [UNIT] * 2).makespan > 0  # a single ring cannot close a circle
    second = [MicroBatch((Shard(3, zigzag_ranges(8, 2, member), (0, 1)),)) for member in (0, 1)]
    twice = StepPlan(2, 8, (*lengths, 8), ((ring[0], second[0]), (ring[1], first, *rest, second[1])))
    assert replay_stages(twice, [UNIT]).makespan > 0
    with pytest.raises(ValueError, match=r"deadlocks: \d+ of 16 actions never start.*stage 0.*aligned slots"):
        replay_stages(twice, [UNIT] * 2)
    aligned = ((ring[0], MicroBatch(()), MicroBatch(()), second[0]), twice.ranks[1])
    assert replay_stages(StepPlan(2, 8, (*lengths, 8), aligned, aligned=True), [UNIT] * 2).makespan > 0


@pytest.mark.slow
@pytest.mark.parametrize("balance", [row.name for row in PLANNERS if row.aligned])
def test_plans_of_the_planner_run(balance: str) -> None:
    random = np.random.default_rng(3)
    for _ in range(10):
        lengths = np.minimum(256, 1 + random.pareto(0.7, size=60) * 8).astype(int).tolist()
        planner = HdpPlanner(Cluster(6, 64), (STAGE,) * 4, balance=balance, aligned=True)
        plan = planner(lengths)
        assert plan.aligned
        assert replay_stages(plan, [STAGE] * 4).makespan > 0
