"""Slices chosen by the planner: never slower than options tried separately, and never over the memory budget."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from bytescale_ext.errors import OutOfTime
from bytescale_ext.measure.cost_file import shipped
from bytescale_ext.plan.cost.shards import ShardTable
from bytescale_ext.plan.evaluate.replay import replay_stages
from bytescale_ext.plan.evaluate.slicing_choice import OPTIONS, TRIES, SlicingChoice, TimedSlicing, _table
from bytescale_ext.plan.hdp.aligned import search as pipelines
from bytescale_ext.plan.hdp.planner import HdpPlanner
from bytescale_ext.plan.hdp.problem import Problem
from bytescale_ext.plan.memory.held import peak_memory
from bytescale_ext.plan.setup.costs import stage_costs
from bytescale_ext.plan.setup.memory import stage_memory
from bytescale_ext.plan.setup.setup import setup_of_cost
from bytescale_ext.plan.step.check import check_step_plan
from bytescale_ext.plan.step.plan import StepPlan
from bytescale_ext.plan.step.sizes import ONE_SLICE, Cluster, Slicing

COST = shipped("bytescale_7b")
CLUSTER, STAGES = Cluster(8, 8192), 4
SETUP = setup_of_cost(COST, STAGES, CLUSTER)
MEMORY = stage_memory(SETUP)
COSTS = stage_costs(SETUP)
LENGTHS = (60_000, 30_000, *(9_000,) * 4, *(3_000,) * 12, *(500,) * 24)
SHORT = [500] * 300


@pytest.fixture(autouse=True, scope="module")
def few_arrangements() -> Iterator[None]:
    """Planner with a short search for each placement."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipelines, "_MAX_ARRANGEMENTS", 4)
        yield


def planner(gigabytes: float, options: tuple[Slicing, ...] = OPTIONS) -> HdpPlanner:
    return HdpPlanner(CLUSTER, COSTS, balance="pp", choice=SlicingChoice(MEMORY, gigabytes * 1e9, options))


@cache
def planned(gigabytes: float, options: tuple[Slicing, ...] = OPTIONS) -> StepPlan:
    """Return the plan of LENGTHS, made once for all tests."""
    return planner(gigabytes, options)(LENGTHS)


def seconds(plan: StepPlan) -> float:
    assert plan.slicing is not None
    return replay_stages(plan, (COSTS[-1],) * STAGES, plan.slicing).makespan


def gigabytes(plan: StepPlan) -> float:
    assert plan.slicing is not None
    most = peak_memory(ShardTable.of(plan), plan.slicing, COSTS[0].both, MEMORY)
    return most.device_bytes(MEMORY) / 1e9


@pytest.fixture(scope="module")
def free() -> StepPlan:
    return planned(1000)


def test_it_is_at_least_as_fast_as_the_largest_option_by_hand(free: StepPlan) -> None:
    check_step_plan(free, LENGTHS)
    by_hand = Slicing(12, 1 << 20, eager=True)
    plan = HdpPlanner(CLUSTER, COSTS, by_hand, balance="pp")(LENGTHS)
    assert plan.slicing is None
    assert seconds(free) <= replay_stages(plan, (COSTS[-1],) * STAGES, by_hand).makespan * (1 + 1e-9)


@pytest.mark.slow
def test_plans_hold_their_budget(free: StepPlan) -> None:
    """Budgets are between the least memory of slices and the memory of the fastest plan."""
    one_option = planned(1, OPTIONS[-2:-1])  # nothing fits, so the option with the least memory
    assert one_option.slicing == OPTIONS[-2]
    least = gigabytes(one_option)
    for share in (0.9, 0.5):
        budget = least + share * (gigabytes(free) - least)
        plan = planned(budget)
        assert gigabytes(plan) <= budget
        assert seconds(plan) >= seconds(free) * 0.99
    assert plan == planner(budget)(LENGTHS)


@pytest.mark.slow
def test_the_slices_depend_on_the_step() -> None:
    """If all documents are short, launches cost more than the bubble. There are no rings."""
    chosen = {planner(1000)(lengths).slicing for lengths in (LENGTHS, SHORT, [500] * 8)}
    assert len(chosen) > 1
    assert planner(1000)(SHORT).slicing.kept_tokens == 0  # type: ignore[union-attr]


def test_a_plan_with_slices_is_written_read_and_compared(free: StepPlan) -> None:
    again = StepPlan.from_json(free.to_json())
    assert again.slicing == free.slicing
    assert again.digest() == free.digest()
    others = {
        StepPlan(free.num_ranks, free.tokens_per_rank, free.lengths, free.ranks, True, slicing).digest()
        for slicing in (
            None, ONE_SLICE, Slicing(2), Slicing(2, 9), Slicing(2, 9, eager=True), Slicing(2, 9, summed_tokens=8),
            Slicing(2, 9, swapped_tokens=10),
        )
    }  # fmt: skip
    assert len(others) == 7


def test_a_budget_that_nothing_fits_is_refused() -> None:
    choice = SlicingChoice(MEMORY, 1e9)
    with pytest.raises(
        ValueError, match=r"take at least .* GB of device memory in slices, and --device-memory-gb is 1:"
    ):
        choice.check_fits(COSTS[0].both, CLUSTER.tokens_per_rank)
    SlicingChoice(MEMORY, 80e9).check_fits(COSTS[0].both, CLUSTER.tokens_per_rank)


@pytest.mark.slow
def test_a_stage_in_the_middle_may_hold_most() -> None:
    """With half of all layers, the third stage stores fewer slices than the first stage, but in more layers."""
    uneven = replace(MEMORY, num_layers=(4, 4, 20, 4))
    choice = SlicingChoice(uneven, 46e9)
    plan = HdpPlanner(CLUSTER, COSTS, balance="pp", choice=choice)(LENGTHS)
    assert plan.slicing is not None
    assert peak_memory(ShardTable.of(plan), plan.slicing, COSTS[0].both, uneven).device_bytes(uneven) <= 46e9


def test_out_of_time_leaves_no_half_chosen_plan() -> None:
    """Ranks run out of time at different moments, so a plan that depends on the moment could differ between ranks."""
    asked = iter([False] * 10 + [True] * 1000)
    with pytest.raises(OutOfTime):
        planner(1000)(LENGTHS, lambda: next(asked))


@cache
def in_host(host_gigabytes: float, key_read: float) -> StepPlan:
    """Return the plan of 12 eager slices. The budget is their memory without kept keys and 0.3 GB."""
    option, costs = OPTIONS[-1:], tuple(replace(cost, key_read=key_read) for cost in COSTS)
    budget = gigabytes(planned(1, option)) + 0.3
    choice = SlicingChoice(MEMORY, budget * 1e9, option, host_gigabytes * 1e9)
    plan = HdpPlanner(CLUSTER, costs, balance="pp", choice=choice)(LENGTHS)
    assert gigabytes(plan) <= budget
    return plan


@pytest.mark.slow
def test_keys_go_to_host_memory_where_that_is_faster() -> None:
    """With a fast link all keys are kept. With a slow link the keys of the longest sequences travel again."""
    fast, slow, without = in_host(1000, 0.0), in_host(1000, 1.0), in_host(0, 0.0)
    assert fast.slicing is not None
    assert slow.slicing is not None
    assert without.slicing is not None
    assert fast.slicing.kept_tokens < fast.slicing.swapped_tokens == max(LENGTHS)
    assert slow.slicing == without.slicing
    assert not without.slicing.swapped_tokens
    check_step_plan(fast, LENGTHS)
    assert StepPlan.from_json(fast.to_json()).slicing == fast.slicing
    assert seconds(fast) <= seconds(without)


@pytest.mark.parametrize("gigabytes", [40.0, 1000.0])
def test_only_options_that_may_be_fastest_are_fitted(gigabytes: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The three fastest options of a placement equal the result of fitting all options."""
    choice = SlicingChoice(MEMORY, gigabytes * 1e9)
    lengths = np.array(LENGTHS)
    problem = Problem(lengths, -(-lengths // CLUSTER.tokens_per_rank), CLUSTER, COSTS, OPTIONS[-1], aligned=True)
    placed = pipelines.PipelinedPlacer()(problem, thorough=False)
    fitted: list[Slicing] = []
    of_option = SlicingChoice._fitted

    def noted(self: SlicingChoice, problem: Problem, table: ShardTable, option: Slicing) -> list[Slicing]:
        found = of_option(self, problem, table, option)
        fitted.extend(found)
        return found

    monkeypatch.setattr(SlicingChoice, "_fitted", noted)
    found = sorted(choice._timed_options(problem, placed))
    some, table = len(fitted), _table(problem, placed)
    every = [one for option in OPTIONS for one in choice._fitted(problem, table, option)]
    best = sorted(TimedSlicing.of(replace(problem, slicing=one), placed) for one in every)
    assert [one.seconds for one in found[:TRIES]] == pytest.approx([one.seconds for one in best[:TRIES]])
    assert found[0].slicing == best[0].slicing
    assert TRIES <= some < len(every)
