"""Aligned slots: the planner's clock against the replay, shelves, and what the search must reach."""

from __future__ import annotations

import numpy as np
import pytest

from bytescale_ext.cost_file import shipped
from bytescale_ext.data.samplers import sample_lengths
from bytescale_ext.plan.cost import CostModel, StageCost
from bytescale_ext.plan.pipelines_clock import one_forward_one_backward, run_pipelines, slot_seconds
from bytescale_ext.plan.pipelines_shelves import RingWork, cut_regions, fill_shelves
from bytescale_ext.plan.placed import PlacedRanks
from bytescale_ext.plan.planner import HdpPlanner
from bytescale_ext.plan.replay import replay_stages
from bytescale_ext.plan.schedule import stage_actions
from bytescale_ext.plan.seq1f1b import seq1f1b_schedule
from bytescale_ext.plan.shapes import StepPlan
from bytescale_ext.plan.simulate import stage_costs
from tests.plan.pipelines import random_plan

STAGE = StageCost(CostModel(a=0.01, b=1.0, c=0.3, g=2.0), CostModel(a=0.025, b=2.0, c=0.6, g=2.0))


@pytest.mark.parametrize(
    ("num_stages", "num_slices", "eager"),
    [
        (1, 1, False),
        (2, 1, False),
        (3, 1, False),
        (8, 1, False),
        (3, 2, False),
        (4, 4, False),
        (2, 3, True),
        (4, 2, True),
    ],
)
def test_the_clock_shows_what_the_replay_shows(num_stages: int, num_slices: int, eager: bool) -> None:
    random = np.random.default_rng(num_stages)
    stage = StageCost(CostModel(a=0.01, b=0.0, c=0.3, g=2.0), CostModel(a=0.025, b=0.0, c=0.6, g=2.0))  # b: see below
    for _ in range(15):
        plan = random_plan(random, int(random.integers(2, 12)), int(random.integers(2, 9)))
        assert isinstance(plan.ranks, PlacedRanks)
        if (plan.ranks.counts == 0).any():
            continue
        kept = int(np.median(plan.lengths))
        finish = run_pipelines(slot_seconds(plan.ranks, stage, num_slices, kept), num_stages, eager)
        replayed = replay_stages(plan, [stage] * num_stages, num_slices=num_slices, kept_tokens=kept, eager=eager)
        offsets = np.cumsum(replayed.counts) * num_slices
        np.testing.assert_allclose(finish, [replayed.stops[:stop][-num_slices:].max() for stop in offsets])
        # linear work is an even share of the sequence on the clock, and that of the tokens there in the replay
        rounded = replay_stages(plan, [STAGE] * num_stages, num_slices=num_slices, eager=eager).makespan
        clock = run_pipelines(slot_seconds(plan.ranks, STAGE, num_slices), num_stages, eager)
        assert clock.max() == pytest.approx(rounded, rel=0.02)


@pytest.mark.parametrize(("num_stages", "num_slots"), [(1, 3), (4, 2), (4, 9), (8, 20)])
def test_waves_are_megatrons_order(num_stages: int, num_slots: int) -> None:
    lanes: list[list[tuple[str, int]]] = [[] for _ in range(num_stages)]
    for kinds, slots, stages in one_forward_one_backward(num_stages, num_slots):
        assert len(set(stages.tolist())) == len(stages)
        for kind, slot, stage in zip(kinds.tolist(), slots.tolist(), stages.tolist(), strict=True):
            lanes[stage].append(("FB"[kind], slot))
    for stage, lane in enumerate(lanes):
        assert lane == [(action.kind, action.micro_batch) for action in stage_actions(num_slots, stage, num_stages)]


@pytest.mark.parametrize(
    ("num_stages", "num_slots", "num_slices", "eager"),
    [(1, 3, 2, False), (4, 2, 3, False), (3, 7, 4, False), (3, 7, 4, True), (4, 2, 3, True)],
)
def test_waves_of_slices_are_seq1f1bs_order(num_stages: int, num_slots: int, num_slices: int, eager: bool) -> None:
    lanes: list[list[tuple[str, int, int]]] = [[] for _ in range(num_stages)]
    for kinds, units, stages in one_forward_one_backward(num_stages, num_slots, num_slices, eager):
        for kind, unit, stage in zip(kinds.tolist(), units.tolist(), stages.tolist(), strict=True):
            lanes[stage].append(("FB"[kind], *divmod(unit, num_slices)))
    schedule = seq1f1b_schedule(num_stages, num_slots, num_slices, eager=eager)
    for lane, actions in zip(lanes, schedule.stages, strict=True):
        assert lane == [tuple(action)[:3] for action in actions]


def ring_work(lengths: list[int], capacity: int, num_ranks: int) -> RingWork:
    sizes = np.array(lengths, dtype=np.int64)
    least = -(-sizes // capacity)
    return RingWork(sizes.astype(np.float64), sizes * (0.01 * sizes + 1.0), least, np.minimum(2 * least, num_ranks))


@pytest.mark.parametrize("node", [4, 7, 64])
def test_shelves_hold_each_ring_once_and_side_by_side(node: int) -> None:
    lengths = sorted(np.random.default_rng(0).integers(65, 1500, 80).tolist(), reverse=True)
    work = ring_work(lengths, 64, 32)
    region = fill_shelves(work, 8, 40, 0, 80, node, 3000.0, CostModel(a=0.01, b=1.0).sequence_costs)
    assert sorted(ring for shelf in region.shelves for ring in shelf.rings.tolist()) == list(range(80))
    for shelf in region.shelves:
        in_order = np.argsort(shelf.first_ranks)
        ends = (shelf.first_ranks + shelf.widths)[in_order]
        assert (shelf.first_ranks[in_order][1:] >= ends[:-1]).all()
        assert shelf.first_ranks.min() >= 8 and ends[-1] <= 40
        assert (shelf.widths >= work.least[shelf.rings]).all()


def test_a_shelf_is_level() -> None:
    region = fill_shelves(
        ring_work([800] * 8, 64, 64), 0, 64, 0, 8, 64, 3000.0, CostModel(a=0.01, b=1.0).sequence_costs
    )
    assert [shelf.widths.tolist() for shelf in region.shelves] == [[16] * 4, [16] * 4]


def test_regions_are_apart_and_the_longest_come_first() -> None:
    work = ring_work([1500, 1400, *[200] * 60], 64, 64)
    cuts = cut_regions(work, 64, 8, height=2000.0, budget=2500.0, peak=0.5, most=4)
    assert len(cuts) > 1
    assert cuts[0][0] == 0 and cuts[-1][1] == 64 and cuts[0][2] == 0 and cuts[-1][3] == 62
    for one, other in zip(cuts, cuts[1:], strict=False):
        assert one[1] == other[0] and one[1] % 8 == 0 and one[3] == other[2]


@pytest.mark.parametrize("num_stages", [4, 8])
def test_equal_micro_batches_have_the_textbook_bubble(num_stages: int) -> None:
    """Nothing but short sequences of one length: (m + p - 1) / m, or better, as the ends are smaller."""
    lengths = [64] * (16 * 40)
    plan = HdpPlanner(16, 64, STAGE, balance="pp", num_stages=num_stages)(lengths)
    mean = 40 * (STAGE.both.sequence_cost(64, 1) + STAGE.both.g)
    assert replay_stages(plan, [STAGE] * num_stages).makespan <= 1.001 * mean * (40 + num_stages - 1) / 40


@pytest.mark.parametrize("num_slices", [2, 4])
def test_equal_micro_batches_in_slices_have_the_textbook_bubble(num_slices: int) -> None:
    free = StageCost(CostModel(a=0.01, b=1.0), CostModel(a=0.025, b=2.0))
    plan = HdpPlanner(16, 64, free, balance="pp", num_stages=4, num_slices=num_slices)([64] * (16 * 10))
    mean = 10 * free.both.sequence_cost(64, 1)
    makespan = replay_stages(plan, [free] * 4, num_slices=num_slices).makespan
    assert makespan <= 1.001 * mean * (10 + 3 / num_slices) / 10


def test_keys_that_are_kept_make_many_slices_pay() -> None:
    """Where prefixes travel again 8 slices are slower than none; where they are kept they are faster by far."""
    lengths = sample_lengths("byted", 65536, 1 << 20, 1).tolist()
    stages = stage_costs(shipped("bytescale_7b"), 8)
    seconds = []
    for num_slices, kept in ((1, 0), (8, 0), (8, 65536)):
        plan = HdpPlanner(16, 8192, stages[-1], balance="pp", num_stages=8, num_slices=num_slices, kept_tokens=kept)
        seconds.append(replay_stages(plan(lengths), stages, num_slices=num_slices, kept_tokens=kept).makespan)
    assert seconds[1] > seconds[0] > 1.15 * seconds[2]


def test_slots_rise_and_fall() -> None:
    """The tallest slot of a step of longs and shorts is neither the first nor the last."""
    random = np.random.default_rng(1)
    lengths = np.append(random.integers(100, 400, 30), random.integers(1, 60, 600)).tolist()
    plan = HdpPlanner(16, 64, STAGE, balance="pp", num_stages=4)(lengths)
    assert isinstance(plan.ranks, PlacedRanks)
    slots = slot_seconds(plan.ranks, STAGE).seconds.sum(axis=0)
    for rank, count in enumerate(plan.ranks.counts.tolist()):
        column = slots[:count, rank]
        assert column[0] < column.max() and column[-1] < column.max()


def test_without_pipelines_aligned_slots_cost_little() -> None:
    """Expert parallelism: one stage, aligned slots."""
    random = np.random.default_rng(1)
    lengths = np.append(random.integers(100, 400, 30), random.integers(1, 60, 600)).tolist()
    aligned = HdpPlanner(16, 64, STAGE, balance="pp")(lengths)
    free: StepPlan = HdpPlanner(16, 64, STAGE, balance="dp")(lengths)
    assert replay_stages(aligned, [STAGE]).makespan <= 1.1 * replay_stages(free, [STAGE]).makespan
