"""Aligned slots: the planner's clock against the replay, shelves, and quality of the search."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bytescale_ext.plan.cost.cost_model import CostModel, StageCost
from bytescale_ext.plan.evaluate.length_samplers import sample_lengths
from bytescale_ext.plan.evaluate.replay import replay_stages
from bytescale_ext.plan.hdp.aligned import search
from bytescale_ext.plan.hdp.aligned.arrangements import SLICED_STARTS, STARTS, Arrangement
from bytescale_ext.plan.hdp.aligned.clock import action_waves, run_pipelines, slot_seconds
from bytescale_ext.plan.hdp.aligned.plans import build_plans, level_plans
from bytescale_ext.plan.hdp.aligned.search import ArrangementSearch, PipelinedPlacer
from bytescale_ext.plan.hdp.aligned.shelving import Shelver, Shelving
from bytescale_ext.plan.hdp.aligned.step import AlignedStep
from bytescale_ext.plan.hdp.planner import HdpPlanner
from bytescale_ext.plan.hdp.problem import Problem
from bytescale_ext.plan.schedule.actions import seq1f1b_schedule
from bytescale_ext.plan.step.placed import PlacedRanks
from bytescale_ext.plan.step.sizes import ONE_SLICE, Cluster, Slicing
from tests.plan.hdp.aligned.random_plans import random_plan

STAGE = StageCost(CostModel(a=0.01, b=1.0, c=0.3, g=2.0), CostModel(a=0.025, b=2.0, c=0.6, g=2.0))


@pytest.mark.parametrize(
    ("num_stages", "slicing"),
    [
        (1, Slicing()),
        (2, Slicing()),
        (3, Slicing()),
        (8, Slicing()),
        (3, Slicing(2)),
        (4, Slicing(4)),
        (2, Slicing(3, eager=True)),
        (4, Slicing(2, eager=True)),
    ],
)
def test_the_clock_agrees_with_the_replay(num_stages: int, slicing: Slicing) -> None:
    random = np.random.default_rng(num_stages)
    stage = StageCost(CostModel(a=0.01, b=0.0, c=0.3, g=2.0), CostModel(a=0.025, b=0.0, c=0.6, g=2.0))  # b: see below
    for _ in range(15):
        plan = random_plan(random, int(random.integers(2, 12)), int(random.integers(2, 9)))
        assert isinstance(plan.ranks, PlacedRanks)
        if (plan.ranks.counts == 0).any():
            continue
        keeping = replace(slicing, kept_tokens=int(np.median(plan.lengths)))
        finish = run_pipelines(slot_seconds(plan.ranks, stage, keeping), num_stages)
        replayed = replay_stages(plan, [stage] * num_stages, keeping)
        offsets = np.cumsum(replayed.counts) * slicing.num_slices
        ends = [replayed.stops[:stop][-slicing.num_slices :].max() for stop in offsets]
        np.testing.assert_allclose(finish, ends)
        # the clock divides linear work of a sequence evenly over ranks, the replay by their tokens
        rounded = replay_stages(plan, [STAGE] * num_stages, slicing).makespan
        clock = run_pipelines(slot_seconds(plan.ranks, STAGE, slicing), num_stages)
        assert clock.max() == pytest.approx(rounded, rel=0.02)


def side_by_side(plans: list[PlacedRanks]) -> PlacedRanks:
    """Return plans side by side, as one plan on all their ranks."""
    begins = np.cumsum([0, *(plan.num_ranks for plan in plans)]).tolist()
    firsts = [begin + plan.first_ranks for begin, plan in zip(begins, plans, strict=False)]
    columns = [np.concatenate([getattr(plan, name) for plan in plans]) for name in ("lengths", "widths", "orders")]
    return PlacedRanks(begins[-1], columns[0], np.concatenate(firsts), *columns[1:], aligned=True)


@pytest.mark.parametrize("slicing", [Slicing(), Slicing(3), Slicing(3, eager=True)])
def test_plans_side_by_side_end_as_each_by_itself(slicing: Slicing) -> None:
    random = np.random.default_rng(0)
    for num_stages in (1, 2, 5):
        plans = [random_plan(random, int(random.integers(6, 9)), most).ranks for most in (2, 4, 9)]
        placed = [plan for plan in plans if isinstance(plan, PlacedRanks)]
        alone = [run_pipelines(slot_seconds(one, STAGE, slicing), num_stages) for one in placed]
        together = run_pipelines(slot_seconds(side_by_side(placed), STAGE, slicing), num_stages)
        assert len(placed) == 3
        np.testing.assert_array_equal(together, np.concatenate(alone))


@pytest.mark.slow
@pytest.mark.parametrize("slicing", [ONE_SLICE, Slicing(4, 3000)])
def test_arrangements_timed_together_give_the_same_plan(monkeypatch: pytest.MonkeyPatch, slicing: Slicing) -> None:
    lengths = [6000, 3500, 2000, *(700,) * 12, *(90,) * 60]
    planner = HdpPlanner(Cluster(8, 1024, 4), (STAGE,) * 3, slicing, balance="pp")
    together = planner(lengths)
    monkeypatch.setattr(search, "_BATCH_RANKS", 1)
    assert planner(lengths) == together


@pytest.mark.parametrize(
    ("num_stages", "num_slots", "slicing"),
    [
        (1, 3, Slicing()),
        (4, 2, Slicing()),
        (8, 20, Slicing()),
        (1, 3, Slicing(2)),
        (4, 2, Slicing(3)),
        (3, 7, Slicing(4)),
        (3, 7, Slicing(4, eager=True)),
        (4, 2, Slicing(3, eager=True)),
    ],
)
def test_waves_keep_the_order_of_each_stage(num_stages: int, num_slots: int, slicing: Slicing) -> None:
    lanes: list[list[tuple[str, int, int]]] = [[] for _ in range(num_stages)]
    for kinds, units, stages in action_waves(num_stages, num_slots, slicing):
        assert len(set(stages.tolist())) == len(stages)
        for kind, unit, stage in zip(kinds.tolist(), units.tolist(), stages.tolist(), strict=True):
            lanes[stage].append(("FB"[kind], *divmod(unit, slicing.num_slices)))
    schedule = seq1f1b_schedule(num_stages, num_slots, slicing)
    for lane, actions in zip(lanes, schedule.stages, strict=True):
        assert lane == [tuple(action)[:3] for action in actions]


@pytest.mark.parametrize("num_stages", [4, 8])
def test_equal_micro_batches_have_the_textbook_bubble(num_stages: int) -> None:
    """Only short sequences of one length take (m + p - 1) / m, or less, because the ends are smaller."""
    lengths = [64] * (16 * 40)
    plan = HdpPlanner(Cluster(16, 64), (STAGE,) * num_stages, balance="pp")(lengths)
    mean = 40 * (STAGE.both.sequence_cost(64, 1) + STAGE.both.g)
    assert replay_stages(plan, [STAGE] * num_stages).makespan <= 1.001 * mean * (40 + num_stages - 1) / 40


@pytest.mark.parametrize("num_slices", [2, 4])
def test_equal_micro_batches_in_slices_have_the_textbook_bubble(num_slices: int) -> None:
    free = StageCost(CostModel(a=0.01, b=1.0), CostModel(a=0.025, b=2.0))
    plan = HdpPlanner(Cluster(16, 64), (free,) * 4, Slicing(num_slices=num_slices), balance="pp")([64] * (16 * 10))
    mean = 10 * free.both.sequence_cost(64, 1)
    makespan = replay_stages(plan, [free] * 4, Slicing(num_slices)).makespan
    assert makespan <= 1.001 * mean * (10 + 3 / num_slices) / 10


def test_slots_rise_and_fall() -> None:
    """In a step of long and short sequences, the tallest slot is neither the first nor the last."""
    random = np.random.default_rng(1)
    lengths = np.append(random.integers(100, 400, 30), random.integers(1, 60, 600)).tolist()
    plan = HdpPlanner(Cluster(16, 64), (STAGE,) * 4, balance="pp")(lengths)
    assert isinstance(plan.ranks, PlacedRanks)
    slots = slot_seconds(plan.ranks, STAGE, ONE_SLICE).seconds.sum(axis=0)
    for rank, count in enumerate(plan.ranks.counts.tolist()):
        column = slots[:count, rank]
        assert column[0] < column.max()
        assert column[-1] < column.max()


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[Arrangement]:
    """Return the list of arrangements that are shelved from now on, in order."""
    built: list[Arrangement] = []
    shelved = Shelver.__call__

    def noted(shelver: Shelver, arrangement: Arrangement) -> Shelving:
        built.append(arrangement)
        return shelved(shelver, arrangement)

    monkeypatch.setattr(Shelver, "__call__", noted)
    return built


@pytest.mark.parametrize("slicing", [ONE_SLICE, Slicing(4), Slicing(4).in_eager_order()])
def test_one_rank_tries_only_arrangements_that_differ(slicing: Slicing, built: list[Arrangement]) -> None:
    """Each arrangement is built once, and arrangements that more ranks would try first are not better."""
    lengths = -np.sort(-sample_lengths("github", 4096, 40_000, seed=1).astype(np.int64))
    cluster = Cluster(1, 4096)
    step = AlignedStep(Problem(lengths, np.ones_like(lengths), cluster, (STAGE, STAGE), slicing, aligned=True))
    found = ArrangementSearch(step)
    found.try_arrangements(found.starts, 32)
    found.complete()
    finishes = run_pipelines(slot_seconds(found.best.placed, STAGE, slicing), 2)
    assert 1 < len(built) == len(set(built)) <= 16
    for one in build_plans(step, [Shelver(step)(arrangement) for arrangement in (*STARTS, *SLICED_STARTS)]):
        assert finishes.max() <= one.seconds * (1 + 1e-9)


def random_problem(seed: int, slicing: Slicing = ONE_SLICE, num_stages: int = 3) -> Problem:
    """Return a step of long and short sequences on 8 ranks of 1,024 tokens."""
    random = np.random.default_rng(seed)
    lengths = np.append(random.integers(1000, 6000, 6), random.integers(20, 900, 60))
    return Problem(lengths, -(-lengths // 1024), Cluster(8, 1024), (STAGE,) * num_stages, slicing, aligned=True)


def makespan(problem: Problem, placed: PlacedRanks) -> float:
    return float(run_pipelines(slot_seconds(placed, problem.stage, problem.slicing), len(problem.stages)).max())


def test_each_plan_is_built_once() -> None:
    """Arrangements with equal plans are recognized, and only different plans count."""
    step = AlignedStep(random_problem(0).longest_first()[0])
    found = ArrangementSearch(step)
    found.try_arrangements(
        [Arrangement(), Arrangement(max_spans=2, height=0.1), Arrangement(height=1e-9), Arrangement(height=1e-8)], 32
    )
    keys = [plan.shelving.key for plan in found.plans]
    assert 1 <= len(keys) == len(set(keys)) < 4
    found.try_arrangements(found.starts, 2)
    assert len(set(found.plans)) <= len(keys) + 2
    found.complete()
    assert len({plan.shelving.key for plan in found.plans}) == len(list(found.plans)) <= 32


def test_leveled_plans_are_not_slower() -> None:
    gains = []
    for seed in range(6):
        step = AlignedStep(random_problem(seed, Slicing(2)).longest_first()[0])
        built = build_plans(step, [Shelver(step)(arrangement) for arrangement in SLICED_STARTS[:4]])
        leveled = level_plans(step, built)
        for before, after in zip(built, leveled, strict=True):
            assert after.shelving is before.shelving
            assert makespan(step.problem, after.placed) == pytest.approx(after.seconds)
            gains.append(before.seconds / after.seconds)
    assert min(gains) >= 1 < max(gains)


def test_the_next_problem_of_a_step_begins_with_the_best_arrangements(built: list[Arrangement]) -> None:
    """The search tries a few arrangements of a search in other slices, or else arrangements known to be good."""
    first, second, whole = (random_problem(1, slicing) for slicing in (Slicing(8), Slicing(4), ONE_SLICE))
    place = PipelinedPlacer()
    quick = place(first, thorough=False)
    assert built == list(SLICED_STARTS)
    ordered = AlignedStep(first.longest_first()[0])
    plans = build_plans(ordered, [Shelver(ordered)(arrangement) for arrangement in SLICED_STARTS])
    best = min(plans, key=lambda plan: plan.seconds)
    assert makespan(first, quick) == pytest.approx(best.seconds)
    built.clear()
    place(second, thorough=False)
    assert built[0] == best.shelving.arrangement
    assert set(built) < set(SLICED_STARTS)
    built.clear()
    place(whole, thorough=False)
    assert built == list(STARTS)


@pytest.mark.slow
def test_a_thorough_placement_is_at_least_as_fast_and_made_once() -> None:
    for seed in range(4):
        problem, place = random_problem(seed, Slicing(4)), PipelinedPlacer()
        quick = place(problem, thorough=False)
        best = place(problem, thorough=True)
        assert makespan(problem, best) <= makespan(problem, quick)
        for again in (place(problem, thorough=True), place(problem, thorough=False)):
            assert again.orders.tolist() == best.orders.tolist()
        alone = PipelinedPlacer()(problem, thorough=True)
        assert alone.first_ranks.tolist() == best.first_ranks.tolist()
