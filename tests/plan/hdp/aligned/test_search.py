"""Aligned slots: the planner's clock against the replay, shelves, and what the search must reach."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from bytescale_ext.measure.cost_file import shipped
from bytescale_ext.plan.cost.cost_model import CostModel, StageCost
from bytescale_ext.plan.evaluate.length_samplers import sample_lengths
from bytescale_ext.plan.evaluate.replay import replay_stages
from bytescale_ext.plan.evaluate.schedulers import stage_costs
from bytescale_ext.plan.hdp.aligned import search
from bytescale_ext.plan.hdp.aligned.build import shelve, with_shorts
from bytescale_ext.plan.hdp.aligned.clock import SlotSeconds, action_waves, run_pipelines, slot_seconds
from bytescale_ext.plan.hdp.aligned.layouts import SLICED_STARTS, STARTS, Layout
from bytescale_ext.plan.hdp.aligned.shelves import RegionCut, RingWork, cut_regions, fill_shelves
from bytescale_ext.plan.hdp.aligned.step import AlignedStep
from bytescale_ext.plan.hdp.planner import HdpPlanner
from bytescale_ext.plan.hdp.problem import Problem
from bytescale_ext.plan.schedule.actions import seq1f1b_schedule
from bytescale_ext.plan.step.placed import PlacedRanks
from bytescale_ext.plan.step.plan import StepPlan
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
        # linear work is an even share of the sequence on the clock, and that of the tokens there in the replay
        rounded = replay_stages(plan, [STAGE] * num_stages, slicing).makespan
        clock = run_pipelines(slot_seconds(plan.ranks, STAGE, slicing), num_stages)
        assert clock.max() == pytest.approx(rounded, rel=0.02)


@pytest.mark.parametrize("slicing", [Slicing(), Slicing(3), Slicing(3, eager=True)])
def test_plans_side_by_side_end_as_each_by_itself(slicing: Slicing) -> None:
    random = np.random.default_rng(0)
    for num_stages in (1, 2, 5):
        plans = [random_plan(random, int(random.integers(6, 9)), most) for most in (2, 4, 9)]
        slots = [slot_seconds(plan.ranks, STAGE, slicing) for plan in plans if isinstance(plan.ranks, PlacedRanks)]
        alone = [run_pipelines(one, num_stages) for one in slots]
        together = run_pipelines(SlotSeconds.side_by_side(slots), num_stages)
        assert len(slots) == 3
        np.testing.assert_array_equal(together, np.concatenate(alone))


def test_a_plan_too_large_to_time_is_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    built = []

    def counted(*given: Any) -> Any:
        built.append(given)
        return with_shorts(*given)

    monkeypatch.setattr(search, "_MOST_WORK", 0)
    monkeypatch.setattr(search, "with_shorts", counted)
    plan = HdpPlanner(Cluster(4, 1000), (STAGE,) * 2, balance="pp")([900, 1500, 20])
    assert len(built) == 1
    assert sorted(plan.lengths) == [20, 900, 1500]


@pytest.mark.parametrize("slicing", [ONE_SLICE, Slicing(4, 3000)])
def test_layouts_timed_together_give_the_same_plan(monkeypatch: pytest.MonkeyPatch, slicing: Slicing) -> None:
    lengths = [6000, 3500, 2000, *(700,) * 12, *(90,) * 60]
    planner = HdpPlanner(Cluster(8, 1024, 4), (STAGE,) * 3, slicing, balance="pp")
    together = planner(lengths)
    monkeypatch.setattr(search, "_MOST_TOGETHER", 1)
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


def ring_work(lengths: list[int], capacity: int, most: int, node: int = 64) -> RingWork:
    """Return rings of at most ``most`` ranks on 64 ranks."""
    sizes = np.array(lengths, dtype=np.int64)
    least = -(-sizes // capacity)
    work, seconds = sizes * (0.01 * sizes + 1.0), CostModel(a=0.01, b=1.0).sequence_cost
    return RingWork(
        sizes.astype(np.float64), work, least, np.minimum(2 * least, most), Cluster(64, capacity, node), seconds
    )


@pytest.mark.parametrize("node", [4, 7, 64])
def test_shelves_hold_each_ring_once_and_side_by_side(node: int) -> None:
    lengths = sorted(np.random.default_rng(0).integers(65, 1500, 80).tolist(), reverse=True)
    work = ring_work(lengths, 64, 32, node)
    region = fill_shelves(work, RegionCut(8, 40, 0, 80), 3000.0)
    assert sorted(ring for shelf in region.shelves for ring in shelf.rings.tolist()) == list(range(80))
    for shelf in region.shelves:
        in_order = np.argsort(shelf.first_ranks)
        ends = (shelf.first_ranks + shelf.widths)[in_order]
        assert (shelf.first_ranks[in_order][1:] >= ends[:-1]).all()
        assert shelf.first_ranks.min() >= 8
        assert ends[-1] <= 40
        assert (shelf.widths >= work.min_widths[shelf.rings]).all()


def test_a_shelf_is_level() -> None:
    region = fill_shelves(ring_work([800] * 8, 64, 64), RegionCut(0, 64, 0, 8), 3000.0)
    assert [shelf.widths.tolist() for shelf in region.shelves] == [[16] * 4, [16] * 4]


def test_regions_are_apart_and_the_longest_come_first() -> None:
    work = ring_work([1500, 1400, *[200] * 60], 64, 64, node=8)
    cuts = cut_regions(work, height=2000.0, budget=2500.0, peak=0.5, max_regions=4)
    assert len(cuts) > 1
    assert (cuts[0].first, cuts[0].begin) == (0, 0)
    assert (cuts[-1].stop, cuts[-1].end) == (64, 62)
    for one, other in itertools.pairwise(cuts):
        assert (one.stop, one.end) == (other.first, other.begin)
        assert one.stop % 8 == 0


@pytest.mark.parametrize("num_stages", [4, 8])
def test_equal_micro_batches_have_the_textbook_bubble(num_stages: int) -> None:
    """Nothing but short sequences of one length: (m + p - 1) / m, or better, as the ends are smaller."""
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


def test_keys_that_are_kept_make_many_slices_pay() -> None:
    """Where prefixes travel again 8 slices are slower than none; where they are kept they are faster by far."""
    lengths = sample_lengths("byted", 65536, 1 << 20, 1).tolist()
    stages = stage_costs(shipped("bytescale_7b"), 8)
    seconds = []
    for num_slices, kept in ((1, 0), (8, 0), (8, 65536)):
        plan = HdpPlanner(Cluster(16, 8192), (stages[-1],) * 8, Slicing(num_slices, kept), balance="pp")
        seconds.append(replay_stages(plan(lengths), stages, Slicing(num_slices, kept)).makespan)
    assert seconds[1] > seconds[0] > 1.15 * seconds[2]


def test_slots_rise_and_fall() -> None:
    """The tallest slot of a step of longs and shorts is neither the first nor the last."""
    random = np.random.default_rng(1)
    lengths = np.append(random.integers(100, 400, 30), random.integers(1, 60, 600)).tolist()
    plan = HdpPlanner(Cluster(16, 64), (STAGE,) * 4, balance="pp")(lengths)
    assert isinstance(plan.ranks, PlacedRanks)
    slots = slot_seconds(plan.ranks, STAGE, ONE_SLICE).seconds.sum(axis=0)
    for rank, count in enumerate(plan.ranks.counts.tolist()):
        column = slots[:count, rank]
        assert column[0] < column.max()
        assert column[-1] < column.max()


def test_without_pipelines_aligned_slots_cost_little() -> None:
    """Expert parallelism: one stage, aligned slots."""
    random = np.random.default_rng(1)
    lengths = np.append(random.integers(100, 400, 30), random.integers(1, 60, 600)).tolist()
    aligned = HdpPlanner(Cluster(16, 64), (STAGE,), balance="pp")(lengths)
    free: StepPlan = HdpPlanner(Cluster(16, 64), (STAGE,), balance="dp")(lengths)
    assert replay_stages(aligned, [STAGE]).makespan <= 1.1 * replay_stages(free, [STAGE]).makespan


@pytest.mark.parametrize("slicing", [ONE_SLICE, Slicing(4), Slicing(4).two_ahead()])
def test_one_rank_tries_only_layouts_that_differ(slicing: Slicing, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is built once, and none of those that more ranks try first is better."""
    built: list[Layout] = []

    def noted(step: AlignedStep, layout: Layout) -> Any:
        built.append(layout)
        return shelve(step, layout)

    monkeypatch.setattr(search, "shelve", noted)
    lengths = -np.sort(-sample_lengths("github", 4096, 40_000, seed=1).astype(np.int64))
    cluster = Cluster(1, 4096)
    step = AlignedStep(Problem(lengths, np.ones_like(lengths), cluster, (STAGE, STAGE), slicing, aligned=True))
    placed = search._best_layout(step, None)
    finishes = run_pipelines(slot_seconds(placed, STAGE, slicing), 2)
    assert 1 < len(built) == len(set(built)) <= 16
    for one in search._timed(step, [*STARTS, *SLICED_STARTS], None):
        assert finishes.max() <= one.seconds * (1 + 1e-9)
