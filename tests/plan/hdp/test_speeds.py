"""Plans for ranks of unlike speeds: slow ranks get less work, and a slow rank slows no ring that can do without it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from bytescale_ext.plan.cost.cost_model import CostModel, StageCost
from bytescale_ext.plan.cost.shards import ShardTable
from bytescale_ext.plan.evaluate.bounds import lower_bounds
from bytescale_ext.plan.evaluate.replay import replay_stages
from bytescale_ext.plan.hdp.packing import deal_by_work
from bytescale_ext.plan.hdp.planner import HdpPlanner
from bytescale_ext.plan.step.check import check_step_plan
from bytescale_ext.plan.step.sizes import Cluster
from tests.sample import sampled

FORWARD = CostModel(a=2.4e-11, b=5.4e-7, c=1.3e-8, g=2.3e-5)
STAGE = StageCost(FORWARD, FORWARD.scaled(2.2))
HALF = (1.0,) * 8 + (0.5,) * 8
ONE = (1.0,) * 5 + (0.5,) + (1.0,) * 10


def draw(seed: int, number: int = 400, longest: int = 100_000) -> tuple[int, ...]:
    """Return lengths with a long tail."""
    lengths = np.exp(np.random.default_rng(seed).normal(7.0, 1.6, number))
    return tuple(np.clip(lengths, 1, longest).astype(int).tolist())


def planner_of(speeds: Sequence[float], num_stages: int = 1, num_ranks: int = 16) -> HdpPlanner:
    """Return the balance planner of two nodes."""
    cluster = Cluster(num_ranks, 8192, 8, speeds=tuple(speeds))
    return HdpPlanner(cluster, (STAGE,) * num_stages, balance="dp" if num_stages == 1 else "pp")


def seconds_of(planner: HdpPlanner, lengths: Sequence[int], speeds: Sequence[float]) -> float:
    """Return the time of a valid plan on ranks of these speeds."""
    plan = planner(lengths)
    check_step_plan(plan, lengths, ranks_per_node=8)
    return replay_stages(ShardTable.of(plan).at(np.array(speeds)), planner.stages).makespan


@pytest.mark.slow
@pytest.mark.parametrize("speeds", [HALF, ONE], ids=["a slow node", "a slow rank"])
@pytest.mark.parametrize("num_stages", sampled([1, 2], [1]))
def test_slow_ranks_get_less_work(speeds: tuple[float, ...], num_stages: int) -> None:
    lengths = draw(0, 3000, 60_000)
    aware, unaware = (planner_of(known, num_stages) for known in (speeds, ()))
    seconds = seconds_of(aware, lengths, speeds)
    assert seconds_of(unaware, lengths, speeds) >= 1.3 * seconds
    bound = lower_bounds(lengths, aware.cluster, aware.stages).largest
    assert bound >= 0.95 * seconds, "at least 95 % of the throughput that the sum of the speeds allows"


def test_a_ring_over_unlike_ranks_has_shares_in_proportion_to_speeds() -> None:
    """The longest document needs more ranks than there are neighbours of equal speed."""
    lengths = (100_000, *draw(5, 600, 30_000))
    for speeds, most in ((HALF, 8192 * 8 / 100_000), (ONE, 1.0)):
        planner = planner_of(speeds)
        plan = planner(lengths)
        (shard,) = [shard for batch in plan.ranks[5] for shard in batch.shards if shard.seq == 0]
        assert shard.ring == tuple(range(16))
        assert sum(shard.shares) == 100_000
        seconds = np.array(shard.shares) / speeds
        assert max(shard.shares) == 8192 or seconds.max() < 1.001 * seconds.min()
        assert sum(np.array(shard.shares)[np.array(speeds) == 1.0]) <= most * 100_000
        bound = lower_bounds(lengths, planner.cluster, planner.stages).largest
        assert bound >= 0.95 * seconds_of(planner, lengths, speeds)
    equal = seconds_of(planner_of(()), lengths, ONE)
    assert equal >= 1.3 * seconds_of(planner_of(ONE), lengths, ONE)


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.slow
def test_equal_speeds_change_no_plan(num_stages: int) -> None:
    for seed, number in ((1, 400), (2, 20)):
        lengths = draw(seed, number)
        assert planner_of((1.0,) * 16, num_stages)(lengths).digest() == planner_of((), num_stages)(lengths).digest()


@pytest.mark.slow
@pytest.mark.parametrize("num_stages", sampled([1, 2], [2]))
def test_any_speeds_have_valid_plans(num_stages: int) -> None:
    """Neither plan nor bound depends on how a document that needs ranks of several speeds is placed."""
    random = np.random.default_rng(3)
    for seed in range(12):
        speeds = random.choice([0.4, 0.7, 1.0, 1.3], 16)
        planner, lengths = planner_of(speeds.tolist(), num_stages), draw(seed, int(random.integers(1, 120)), 16 * 8192)
        seconds = seconds_of(planner, lengths, speeds.tolist())
        assert seconds >= lower_bounds(lengths, planner.cluster, planner.stages).largest * (1 - 1e-9)


def test_work_is_dealt_to_the_rank_that_ends_first() -> None:
    random = np.random.default_rng(4)
    for _ in range(20):
        work, loads = np.sort(random.random(30))[::-1], random.random(6)
        speeds = random.choice([0.5, 1.0, 1.5], 6)
        ends = loads.copy()
        for amount, rank in zip(work, deal_by_work(work, loads, speeds).tolist(), strict=True):
            assert ends[rank] + amount / speeds[rank] == pytest.approx((ends + amount / speeds).min())
            ends[rank] += amount / speeds[rank]


def test_bad_speeds_are_refused() -> None:
    for speeds in ((1.0,) * 15, (1.0,) * 15 + (0.0,), (1.0,) * 15 + (float("nan"),), (1.0,) * 15 + (float("inf"),)):
        with pytest.raises(ValueError, match="16 positive numbers"):
            replace(Cluster(16, 8192), speeds=speeds)
