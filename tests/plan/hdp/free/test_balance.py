"""Balance search: lower bounds, local search of small steps, and distribution of short sequences over ranks."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from bytescale_ext.errors import OutOfTime
from bytescale_ext.plan.cost.cost_model import CostModel
from bytescale_ext.plan.evaluate.replay import replay
from bytescale_ext.plan.hdp.free.balance import _water_level, place_balanced
from bytescale_ext.plan.hdp.free.local_search import list_schedule, place_small
from bytescale_ext.plan.hdp.problem import Problem
from bytescale_ext.plan.step.check import check_step_plan
from bytescale_ext.plan.step.placed import PlacedRanks
from bytescale_ext.plan.step.plan import StepPlan
from bytescale_ext.plan.step.sizes import Cluster
from tests.plan.hdp.problems import problem
from tests.sample import seeds

COST = CostModel(a=0.01, b=1.0, c=0.4, g=2.0)
CAPACITY = 64


def integers(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def step(lengths: np.ndarray, num_ranks: int, node: int | None = None, cost: CostModel = COST) -> Problem:
    """Return a problem with memory for CAPACITY tokens on a rank."""
    return problem(lengths, -(-lengths // CAPACITY), Cluster(num_ranks, CAPACITY, node), cost)


def plan_of(placed: PlacedRanks) -> StepPlan:
    return StepPlan(placed.num_ranks, CAPACITY, tuple(placed.lengths.tolist()), placed)


def makespan(placed: PlacedRanks) -> float:
    return replay(plan_of(placed), COST).makespan


def all_on_the_first_ranks(lengths: np.ndarray, num_ranks: int) -> PlacedRanks:
    """Return a poor plan: sequences of the smallest width one after another, starting from rank 0."""
    widths, count = -(-lengths // CAPACITY), len(lengths)
    return PlacedRanks(num_ranks, lengths, np.zeros(count, dtype=np.int64), widths, np.arange(count))


def test_the_list_takes_the_longest_first_and_the_window_that_is_free_first() -> None:
    unit = CostModel(a=0.0, b=1.0)
    listed = list_schedule(step(integers(2, 8, 6, 3), 3, cost=unit), integers(1, 2, 1, 1))
    assert listed.order.tolist() == [2, 1, 3, 0]  # 6, 4, 3 and 2 seconds
    assert listed.first_ranks.tolist() == [2, 1, 0, 1]
    assert listed.seconds == 7.0


@pytest.mark.parametrize("seed", seeds(8))
def test_rings_of_a_list_are_whole_nodes_or_inside_one(seed: int) -> None:
    random = np.random.default_rng(seed)
    widths = random.choice([1, 2, 3, 4, 8, 12], 20)
    listed = list_schedule(step(random.integers(12, 400, 20), 16, 4), widths)
    for first, width in zip(listed.first_ranks.tolist(), widths.tolist(), strict=True):
        assert first + width <= 16
        assert first % 4 + width <= 4 or first % 4 == 0


@pytest.mark.parametrize("seed", range(6))
def test_the_search_is_sound_and_no_worse_than_what_it_got(seed: int) -> None:
    random = np.random.default_rng(seed)
    lengths = random.integers(8, 250, 12)
    given = all_on_the_first_ranks(lengths, 4)
    seconds = makespan(given)
    found = place_small(step(lengths, 4), [given.widths], given, seconds, 0.0)
    check_step_plan(plan_of(found))
    assert (found.widths >= given.widths).all()
    assert makespan(found) < seconds


def test_other_widths_than_those_it_began_with_are_shorter() -> None:
    gains = []
    for seed in range(6):
        lengths = np.random.default_rng(seed).integers(8, 250, 12)
        given = all_on_the_first_ranks(lengths, 4)
        found = place_small(step(lengths, 4), [given.widths], given, 1e9, 0.0)
        gains.append(list_schedule(step(lengths, 4), given.widths).seconds / makespan(found))
    assert min(gains) > 0.99, gains
    assert max(gains) > 1.1, gains
    assert float(np.mean(gains)) > 1.03, gains


def test_short_sequences_that_follow_each_other_share_micro_batches() -> None:
    lengths = integers(*[12] * 20, 200)
    worst = all_on_the_first_ranks(lengths, 4)
    found = place_small(step(lengths, 4), [worst.widths], worst, 1e9, 0.0)
    packs = [row for rank in found for row in rank if all(len(shard.ring) == 1 for shard in row.shards)]
    assert sum(len(row.shards) for row in packs) >= 15
    assert len(packs) <= 8
    assert all(row.num_tokens <= CAPACITY for row in packs)


def test_the_search_stops_when_told() -> None:
    lengths = np.arange(40, 140, 10)
    given = all_on_the_first_ranks(lengths, 4)
    with pytest.raises(OutOfTime):
        place_small(step(lengths, 4), [given.widths], given, 1e9, 0.0, lambda: True)
    with pytest.raises(OutOfTime):
        place_balanced(step(lengths, 4), lambda: True)


@pytest.mark.parametrize("seed", range(6))
def test_bounds_hold_for_every_choice_of_widths(seed: int) -> None:
    random = np.random.default_rng(seed)
    lengths = random.integers(5, 120, 3)
    here = step(lengths, 3)
    bound = max(here.mean_seconds(), here.longest_seconds())
    for widths in product(*(range(int(low), 4) for low in here.min_widths)):
        assert list_schedule(here, integers(*widths)).seconds >= bound * (1 - 1e-9)
    assert makespan(place_balanced(here)) >= bound * (1 - 1e-9)


@pytest.mark.parametrize("seed", range(6))
def test_balanced_plans_keep_every_law(seed: int) -> None:
    random = np.random.default_rng(100 + seed)
    lengths = np.append(random.integers(65, 500, 6), random.integers(1, 60, 60 + 80 * seed))
    here = step(lengths, 8, 4)
    placed = place_balanced(here)
    check_step_plan(plan_of(placed))
    assert makespan(placed) <= 1.25 * here.mean_seconds()


def test_water_runs_to_the_lowest_ranks() -> None:
    def poured(loads: list[float], speeds: list[float], work: float) -> float:
        low, high = min(loads), max(loads) + work / min(speeds)
        for _ in range(80):
            middle = (low + high) / 2
            filled = sum(max(0.0, middle - load) * speed for load, speed in zip(loads, speeds, strict=True))
            low, high = (middle, high) if filled < work else (low, middle)
        return low

    random = np.random.default_rng(0)
    for _ in range(30):
        loads, work = random.random(int(random.integers(1, 9))) * 10, float(random.random() * 20)
        speeds = random.choice([0.5, 1.0, 2.0], len(loads))
        expected = poured(loads.tolist(), speeds.tolist(), work)
        assert _water_level(loads, np.array([work / 2, work / 2]), speeds) == pytest.approx(expected)
    assert _water_level(np.array([3.0, 1.0]), np.zeros(0), np.ones(2)) == 1.0
