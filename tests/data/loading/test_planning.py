"""Plan of a step: checked, within its time limit, and in a separate process."""

from __future__ import annotations

import gc
import io
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

import numpy as np
import pytest

from bytescale_ext.data.loading import plan_pipe, planning
from bytescale_ext.data.loading.planning import CheckedPlanner, PlanMaker, PlannerInProcess
from bytescale_ext.data.samples.length_reader import StepLengths
from bytescale_ext.errors import OutOfTime, PlanError
from bytescale_ext.plan.cost.cost_model import CostModel, StageCost
from bytescale_ext.plan.cost.learned import UNLEARNED, LearnedCosts
from bytescale_ext.plan.cost.shards import CoupledShards
from bytescale_ext.plan.hdp.planner import HdpPlanner
from bytescale_ext.plan.hdp.table import planner_names
from bytescale_ext.plan.setup.forecast import StepTime
from bytescale_ext.plan.step.check import check_step_plan
from bytescale_ext.plan.step.numbers import Numbers
from bytescale_ext.plan.step.placed import PlacedRanks
from bytescale_ext.plan.step.plan import StepPlan
from bytescale_ext.plan.step.reductions import Overlaps
from bytescale_ext.plan.step.sizes import Cluster, Slicing
from bytescale_ext.plan.step.table import RankShards, shards_of_rank


class Clock:
    """Clock that advances by a second at every reading."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += 1.0
        return self.now


class Patient:
    """Planner that asks ``looks`` times whether to stop, then returns a plan of two ranks.

    Its simple plan has one rank.
    """

    def __init__(self, looks: int) -> None:
        self.looks = looks
        self.was_limited = False

    def __call__(self, lengths: Sequence[int], should_stop: Callable[[], bool] | None = None) -> StepPlan:
        self.was_limited = should_stop is not None
        for _ in range(self.looks):
            if should_stop is not None and should_stop():
                raise OutOfTime("the time is over")
        return StepPlan(2, 8, tuple(lengths), ((), ()))

    def fallback(self, lengths: Sequence[int]) -> StepPlan:
        return StepPlan(1, 8, tuple(lengths), ((),))


@pytest.mark.parametrize(("looks", "seconds", "num_ranks"), [(5, 5.0, 2), (6, 5.0, 1), (0, 0.5, 2), (1, 0.5, 1)])
def test_the_simple_plan_is_taken_when_time_is_over(
    monkeypatch: pytest.MonkeyPatch, looks: int, seconds: float, num_ranks: int
) -> None:
    monkeypatch.setattr(planning, "time", Clock())
    plan, fell_back = PlanMaker(Patient(looks), None, seconds)((3, 4))
    assert (plan.num_ranks, fell_back, plan.lengths) == (num_ranks, num_ranks == 1, (3, 4))


@pytest.mark.parametrize("balance", planner_names())
def test_every_planner_stops_and_has_a_simple_plan(monkeypatch: pytest.MonkeyPatch, balance: str) -> None:
    cost = CostModel(a=0.01, b=1.0)
    planner = HdpPlanner(Cluster(4, 64), (StageCost(cost, cost),) * (2 if balance == "pp" else 1), balance=balance)
    lengths = (*[200, 130] * 10, *[9] * 40)
    monkeypatch.setattr(planning, "time", Clock())
    plan, fell_back = PlanMaker(planner, plan_seconds=0.5)(lengths)
    assert plan.ranks == (planner.fallback(lengths) if fell_back else planner(lengths)).ranks
    assert fell_back == (balance != "none")  # the simple plan equals the plan of "none"


COST = StageCost(CostModel(a=0.01, b=1.0, c=0.3, g=2.0), CostModel(a=0.025, b=2.0, c=0.6, g=2.0))
SLICED = HdpPlanner(Cluster(8, 64), (COST,) * 2, Slicing(num_slices=3, kept_tokens=100, eager=True), balance="pp")
STEP = (*[200, 130, 90] * 8, *[9] * 60)


class Dreamer:
    """Planner that sleeps for as many seconds as the first length, in any process."""

    def __call__(self, lengths: Sequence[int], should_stop: Callable[[], bool] | None = None) -> StepPlan:
        time.sleep(lengths[0])
        return StepPlan(1, os.getpid(), tuple(lengths), ((),))

    def fallback(self, lengths: Sequence[int]) -> StepPlan:
        return StepPlan(1, 8, tuple(lengths), ((),))


def started(planner: PlannerInProcess) -> int:
    """Return the process that plans. The first plan is made in this process."""
    planner(STEP if planner._planner is SLICED else (0,))
    planner(STEP if planner._planner is SLICED else (0,))
    assert planner._process is not None
    assert planner._process.poll() is None
    return planner._process.pid


@pytest.mark.ranks
def test_a_process_makes_the_same_plans() -> None:
    planner = PlannerInProcess(SLICED, slow_seconds=-1.0)
    assert planner(STEP).digest() == SLICED(STEP).digest()
    assert planner._process is None
    for lengths in (STEP, STEP[::-1], [64] * 40):
        plan = planner(lengths, lambda: False)
        assert plan.digest() == SLICED(lengths).digest()
        assert plan.lengths == tuple(lengths)
        assert list(plan.ranks) == list(SLICED(lengths).ranks)
    assert planner._process is not None
    assert planner.fallback(STEP).digest() == SLICED.fallback(STEP).digest()


@pytest.mark.ranks
def test_a_process_counts_with_the_load_of_each_step() -> None:
    loaded = replace(SLICED, expert_share=0.8)
    planner = PlannerInProcess(loaded, slow_seconds=-1.0)
    here = {load: loaded.with_expert_imbalance(load).stages for load in (1.0, 3.0, 40.0)}
    assert len(set(here.values())) == 3
    first = planner.with_expert_imbalance(40.0)(STEP)
    assert planner._process is None
    for load in (40.0, 1.0, 3.0):
        plan = PlanMaker(planner).with_expert_imbalance(load)(STEP)[0]
        assert plan.digest() == loaded.with_expert_imbalance(load)(STEP).digest()
    assert planner._process is not None
    assert first.digest() == loaded.with_expert_imbalance(40.0)(STEP).digest() != loaded(STEP).digest()
    assert (
        planner.with_expert_imbalance(3.0).fallback(STEP).digest()
        == loaded.with_expert_imbalance(3.0).fallback(STEP).digest()
    )


@pytest.mark.ranks
def test_errors_of_the_process_are_raised_here_and_it_plans_on() -> None:
    planner = PlannerInProcess(SLICED, slow_seconds=-1.0)
    process = started(planner)
    with pytest.raises(ValueError, match="sequence 1 has 5000 tokens, more than 8 ranks of 64 tokens hold"):
        planner((3, 5000))
    assert planner(STEP).digest() == SLICED(STEP).digest()
    assert planner._process is not None
    assert planner._process.pid == process


@pytest.mark.ranks
def test_a_process_that_is_out_of_time_is_ended() -> None:
    """The next plan does not wait for a plan of 1000 seconds."""
    planner = PlannerInProcess(Dreamer(), slow_seconds=-1.0)
    process = started(planner)
    plan, fell_back = PlanMaker(planner, None, 0.1)((1000,))
    assert fell_back
    assert plan.tokens_per_rank == 8
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)
    assert planner((0,), lambda: False).tokens_per_rank not in (os.getpid(), process)


@pytest.mark.ranks
def test_a_process_that_is_killed_loses_nothing() -> None:
    planner = PlannerInProcess(Dreamer(), slow_seconds=-1.0)
    process = started(planner)
    os.kill(process, signal.SIGKILL)
    assert planner((0,)).tokens_per_rank == os.getpid()  # in this process
    assert planner((0,)).tokens_per_rank not in (os.getpid(), process)  # then in a new process


@pytest.mark.ranks
def test_the_process_ends_with_its_planner() -> None:
    planner = PlannerInProcess(Dreamer(), slow_seconds=-1.0)
    process = started(planner)
    del planner
    gc.collect()
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


@pytest.mark.ranks
@pytest.mark.parametrize("slow_seconds", [-1.0, float("inf")])
def test_a_plan_from_a_process_holds_what_its_rank_reads(slow_seconds: float) -> None:
    expected, lengths = HdpPlanner(Cluster(4, 64), (COST,))([200, 9, 64, 30, 5]), [200, 9, 64, 30, 5]
    planner = PlannerInProcess(CheckedPlanner(HdpPlanner(Cluster(4, 64), (COST,)), check_step_plan, 2), slow_seconds)
    plan = [planner(lengths) for _ in range(2)][1]  # the second is from the process
    assert isinstance(plan.ranks, PlacedRanks)
    assert isinstance(expected.ranks, PlacedRanks)
    assert plan.digest() == expected.digest()
    assert plan.ranks.held(2) == expected.ranks[2] == plan.ranks[2]
    mine, by_table = shards_of_rank(plan.ranks, 2), shards_of_rank(replace(expected.ranks), 2)
    assert all(np.array_equal(getattr(mine, name), getattr(by_table, name)) for name in RankShards.__slots__)
    assert ("table" in vars(plan.ranks)) == (slow_seconds > 0)
    assert plan.ranks[1] == expected.ranks[1]
    assert plan == expected
    assert replace(plan, tokens_per_rank=128).digest() == replace(expected, tokens_per_rank=128).digest()
    assert replace(plan, lengths=(1,) * 5).digest() == replace(expected, lengths=(1,) * 5).digest() != plan.digest()


class Squares:
    """Reader of lengths that only the planner's process may read."""

    def lengths(self, samples: np.ndarray) -> np.ndarray:
        lengths: np.ndarray = samples % 7 + 1 + samples**2 % 50
        return lengths


def predicted(plan: StepPlan, learned: LearnedCosts) -> StepTime:
    return StepTime(float(len(plan.lengths)), *learned.factors[:3], makespan=1.0)


@pytest.mark.ranks
def test_the_process_reads_lengths_and_computes_facts_and_its_large_arrays_are_mapped() -> None:
    facts = Overlaps(2), CoupledShards(2)
    here = HdpPlanner(Cluster(4, 64), (COST,))
    maker = PlanMaker(PlannerInProcess(CheckedPlanner(here, check_step_plan, 2, facts, predicted), -1.0), None)
    maker = replace(maker, predict=predicted).with_costs(LearnedCosts((2.0,) * len(UNLEARNED.factors)))
    for size in (20, 20, 20_000):
        wanted = StepLengths(Squares(), Numbers(range(5, 5 + size)))
        plan, fell_back = maker(wanted)
    assert not fell_back
    assert not wanted.is_read
    assert plan.digest() == here(wanted.numbers).digest()
    assert plan.lengths == tuple(wanted)
    assert plan.num_tokens == sum(wanted)
    assert isinstance(plan.ranks, PlacedRanks)
    assert not plan.ranks.first_ranks.flags.owndata
    assert not plan.ranks.first_ranks.flags.writeable
    assert not {"table", "shards"} & set(vars(plan.ranks))
    assert maker.predicted(plan) == StepTime(20_000.0, 2.0, 2.0, 2.0, makespan=1.0)
    assert plan.fact(facts[0]) == facts[0](here(wanted))
    mine, expected = (plan.fact(facts[1]), facts[1](here(wanted)))
    assert np.array_equal(mine.rows, expected.rows)
    assert np.array_equal(mine.tokens, expected.tokens)
    assert not {"table", "shards"} & set(vars(plan.ranks))


def test_a_sender_that_ends_between_pipe_and_memory_is_noticed() -> None:
    mine, other = socket.socketpair()
    pipe = io.BytesIO()
    with mine:
        with other:
            plan_pipe.send(np.arange(plan_pipe.SHARED_BYTES), pipe, other)
        pipe.seek(0)
        assert np.array_equal(cast(np.ndarray, plan_pipe.receive(pipe, mine)), np.arange(plan_pipe.SHARED_BYTES))
        pipe.seek(0)
        with pytest.raises(EOFError):
            plan_pipe.receive(pipe, mine)


def test_a_plan_that_breaks_a_law_is_refused_in_the_process_too() -> None:
    def refuse(plan: StepPlan) -> None:
        raise PlanError("broken")

    planner = CheckedPlanner(HdpPlanner(Cluster(4, 64), (COST,)), refuse, 0)
    for call in (planner, planner.fallback, planner.with_expert_imbalance(1.5), planner.with_costs(UNLEARNED)):
        with pytest.raises(PlanError, match="broken"):
            call([5, 6])
