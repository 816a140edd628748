"""Costs that are learned: kinds of work, fits of factors, speeds of ranks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from bytescale_ext.plan.cost.cost_model import CostModel, StageCost
from bytescale_ext.plan.cost.learned import (
    KINDS,
    LEAST_PASSES,
    LearnedCosts,
    Learner,
    Passes,
    Statistics,
    fit,
    rank_rates,
    slowest_of_groups,
    speeds_of,
    work_of_rows,
)
from bytescale_ext.plan.cost.nodes import Nodes
from bytescale_ext.plan.cost.shards import ShardTable
from bytescale_ext.plan.hdp.planner import HdpPlanner
from bytescale_ext.plan.step.sizes import Cluster

Floats = npt.NDArray[np.float64]

COST = CostModel(a=2.4e-11, b=5.4e-7, c=1.3e-7, g=2.3e-5, h=1e-8, nodes=Nodes(4, 6.0), m=1e-5)
LEARNED = LearnedCosts((2.0, 0.5, 3.0, 0.7, 4.0))


def plan_table() -> ShardTable:
    """Return the shards of a plan with rings, inside nodes and over nodes, and short documents."""
    random = np.random.default_rng(0)
    lengths = (*random.integers(1, 3000, 60).tolist(), 30_000, 11_000, 9000, 5000)
    return ShardTable.of(HdpPlanner(Cluster(8, 4096, 4), (StageCost(COST, COST.scaled(2)),))(lengths))


def synthetic(
    factors: tuple[float, ...],
    num_ranks: int,
    pace: dict[int, float] | None = None,
    shape: Floats | None = None,
    speeds: tuple[float, ...] = (),
) -> Statistics:
    """Return the statistics of passes whose kinds of work take ``factors`` times as long, on ranks of any pace.

    ``shape``: factors that are known before, without their scale: [kinds]. ``speeds``: speeds that are known before.
    """
    random, total = np.random.default_rng(1), Statistics.none(num_ranks)
    known = np.ones(len(KINDS)) if shape is None else shape
    for rank in range(num_ranks):
        work = random.random((40, len(KINDS)))
        seconds = work @ np.array(factors) * (pace or {}).get(rank, 1.0)
        work /= speeds[rank] if speeds else 1.0
        passes = Passes((0, rank), work, seconds, np.ones(40, dtype=np.bool_))
        total += Statistics.none(num_ranks).with_passes(passes, np.arange(40) % 4 == 3, known)
    return total


@pytest.mark.slow
def test_kinds_of_work_add_up_to_the_corrected_cost() -> None:
    """Exchange counts where it is not hidden, as in the cost model, on any nodes."""
    table = plan_table()
    for learned in (LearnedCosts(), LEARNED):
        work = work_of_rows(table, COST, learned)
        assert work @ np.array(learned.factors) == pytest.approx(table.row_costs(learned.of_pass(COST)))
        assert (work[:, KINDS.index("exchange")] > 0).any()


@pytest.mark.slow
def test_a_ring_takes_as_long_as_its_slowest_micro_batch() -> None:
    table = plan_table()
    seconds = table.row_costs(COST)
    slowest = slowest_of_groups(table, seconds)
    for group in np.unique(table.row_groups):
        members = table.row_groups == group
        assert set(seconds[slowest[members]].tolist()) == {seconds[members].max()}


def test_a_fit_finds_the_factors() -> None:
    factors = (2.0, 1.0, 1.5, 0.5, 3.0)
    learner = Learner.new(3).learn(synthetic(factors, 3))
    assert learner.costs.factors == pytest.approx(factors, rel=0.05)
    assert learner.costs.speeds == ()
    for _ in range(4):
        learner = learner.learn(synthetic(factors, 3, shape=learner.shape))
    assert learner.costs.factors == pytest.approx(factors, rel=0.01)


def test_a_kind_without_passes_follows_the_others() -> None:
    statistics = synthetic((3.0,) * 5, 2)
    for array in (statistics.squares, statistics.products):
        array[:, 4] = 0.0
    statistics.squares[:, :, 4] = 0.0
    assert fit(statistics, np.ones(5))[4] == pytest.approx(fit(statistics, np.ones(5))[:4].mean(), rel=0.02)


def test_a_worse_fit_and_few_passes_change_nothing() -> None:
    statistics = synthetic((2.0, 1.0, 1.0, 1.0, 1.0), 1)
    held_out = synthetic((1.0,) * 5, 1)
    for name in ("squares", "products", "measured"):
        getattr(statistics, name)[1] = getattr(held_out, name)[1]
    assert len(set(Learner.new(1).learn(statistics).costs.factors)) == 1, "only the scale follows"
    few = replace(synthetic((2.0, 1.0, 1.0, 1.0, 1.0), 1), counts=np.full(2, LEAST_PASSES / 4))
    assert len(set(Learner.new(1).learn(few).costs.factors)) == 1


def test_slow_ranks_get_a_speed_and_distort_no_fit() -> None:
    learner = Learner.new(5).learn(synthetic((1.0,) * 5, 5, {3: 2.0}))
    assert learner.costs == LearnedCosts(speeds=(1.0, 1.0, 1.0, 0.5, 1.0))
    assert learner.statistics.counts.sum() == 0, "rings of the slow rank slowed others too"


def test_ranks_whose_speeds_never_settle_stop_no_fit() -> None:
    """Passes count in every other exchange. The scale follows in each, so predicted times equal measured times."""
    factors, learner = (4.0, 2.0, 2.0, 2.0, 2.0), Learner.new(4)
    for number, slow in enumerate((2.0, 2.6, 2.0, 2.6)):
        speeds = learner.costs.speeds
        added = synthetic(factors, 4, {0: slow, 1: slow}, learner.shape, speeds)
        learner = learner.learn(added)
        assert learner.is_settling == (number % 2 == 0)
        assert learner.costs.speeds != speeds
        work = added.rank_work[0] * np.array([speeds or np.ones(4)]).T / np.array([learner.costs.speeds]).T
        assert work @ np.array(learner.costs.factors) == pytest.approx(added.rank_seconds[0], rel=0.1)
    assert learner.costs.factors[0] / learner.costs.factors[1] == pytest.approx(2.0, rel=0.1)
    assert not learner.learn(Statistics.none(4)).is_settling


def test_speeds() -> None:
    nan = float("nan")
    assert speeds_of(np.array([1.0, 1.04, 0.97, 1.0]), ()) == ()
    assert speeds_of(np.array([1.0, 0.5, 1.02, 1.0]), ()) == (1.0, 0.5, 1.0, 1.0)
    assert speeds_of(np.array([1.0, nan, 1.0, 1.0]), (1.0, 0.5, 1.0, 1.0)) == (1.0, 0.5, 1.0, 1.0), "no timings"
    assert speeds_of(np.array([1.0, 1.05, 1.0, 1.0]), (1.0, 0.5, 1.0, 1.0)) == (1.0, 0.5, 1.0, 1.0), "noise"
    assert speeds_of(np.array([1.0, 2.0, 1.0, 1.0]), (1.0, 0.5, 1.0, 1.0)) == (), "it recovered"
    assert speeds_of(np.full(3, nan), ()) == ()
    half = speeds_of(np.array([1.0, 0.99, 0.5, 0.51]), ())
    assert len(set(half)) == 2
    assert half[0] / half[2] == pytest.approx(2.0, rel=0.03)


def test_a_rank_without_timings_keeps_its_speed() -> None:
    """The others learn on; without any timings nothing changes."""
    known = LearnedCosts(speeds=(1.0, 1.0, 0.5))
    statistics = synthetic((2.0,) * 5, 3, {2: 2.0})
    silent = synthetic((2.0,) * 5, 3, {0: 1.0})
    for array in (silent.rank_work, silent.rank_seconds):
        array[0, 2] = 0.0
    learner = Learner.new(3, costs=known).learn(silent)
    assert learner.costs.speeds == known.speeds
    assert learner.costs.factors == pytest.approx((2.0,) * 5, rel=0.05)
    assert learner.learn(Statistics.none(3)).costs == learner.costs
    assert Learner.new(3).learn(statistics).costs.speeds == known.speeds


def test_a_slow_stage_slows_its_pipeline() -> None:
    costs = LearnedCosts().with_rates(np.array([[1.0, 1.0, 1.0], [1.0, 0.5, 1.0]]))
    assert costs == LearnedCosts(speeds=(1.0, 0.5, 1.0), stage_speeds=((1.0,) * 3, (1.0, 0.5, 1.0)))
    assert costs.speeds_on(0) == (1.0,) * 3, "passes of the other stages are measured at full speed"
    assert costs.with_rates(np.ones((2, 3))) == costs, "rates are relative to the present speeds"
    assert costs.with_rates(np.array([[1.0, 1.0, 1.0], [1.0, 2.0, 1.0]])) == LearnedCosts(), "it recovered"


def test_numbers_that_are_not_finite_are_dropped() -> None:
    statistics = synthetic((2.0,) * 5, 2)
    statistics.products[0, 1] = float("nan")
    learner = Learner.new(2)
    assert learner.learn(statistics) is learner


def test_a_vector_holds_all_sums() -> None:
    statistics = synthetic((2.0,) * 5, 2)
    again = Statistics.none(2).with_vector(statistics.to_vector())
    assert (again.to_vector() == statistics.to_vector()).all()
    assert rank_rates(again, np.full(5, 2.0)) == pytest.approx(np.ones((1, 2)))
