"""Layouts of aligned slots: rings on shelves, short sequences around them, no slot without use."""

from __future__ import annotations

import numpy as np

from bytescale_ext.plan.cost.cost_model import CostModel, StageCost
from bytescale_ext.plan.hdp.aligned.build import compact_slots, shelve, with_shorts
from bytescale_ext.plan.hdp.aligned.layouts import STARTS
from bytescale_ext.plan.hdp.aligned.shelves import Region
from bytescale_ext.plan.hdp.aligned.step import AlignedStep
from bytescale_ext.plan.hdp.problem import Problem
from bytescale_ext.plan.step.check import check_step_plan
from bytescale_ext.plan.step.plan import StepPlan
from bytescale_ext.plan.step.sizes import Cluster

STAGE = StageCost(CostModel(a=0.01, b=1.0, c=0.3, g=2.0), CostModel(a=0.025, b=2.0, c=0.6, g=2.0))


def random_step(seed: int, num_ranks: int = 8, capacity: int = 64) -> AlignedStep:
    random = np.random.default_rng(seed)
    lengths = np.sort(np.minimum(np.exp(random.normal(3, 1.4, 60)) + 1, num_ranks * capacity).astype(np.int64))[::-1]
    return AlignedStep(Problem(lengths, -(-lengths // capacity), Cluster(num_ranks, capacity), (STAGE,) * 3))


def test_every_layout_is_a_valid_plan() -> None:
    for seed in range(12):
        step = random_step(seed)
        for layout in STARTS:
            shelved = shelve(step, layout)
            placed, seconds = with_shorts(step, layout, shelved, shelved.loads)
            lengths = tuple(placed.lengths.tolist())
            check_step_plan(StepPlan(8, 64, lengths, placed, aligned=True), lengths)
            assert seconds.shape == (8,)
            assert (seconds >= 0).all()


def test_rings_of_a_shelf_have_one_slot_and_ranks_of_their_own() -> None:
    step = random_step(3)
    shelved = shelve(step, STARTS[0])
    for region in shelved.regions:
        for shelf in region.shelves:
            assert len(set(shelved.slots[shelf.rings].tolist())) == 1
            held = [
                rank
                for first, width in zip(shelf.first_ranks.tolist(), shelf.widths.tolist(), strict=True)
                for rank in range(first, first + width)
            ]
            assert len(held) == len(set(held))
            assert region.first <= min(held)
            assert max(held) < region.stop


def test_slots_without_use_are_left_out() -> None:
    region = Region(0, 2, ())
    firsts, widths = np.array([0, 0, 1, 0]), np.array([2, 1, 1, 1])
    slots = compact_slots(firsts, np.array([5, 9, 7, 3]), widths, (region,))
    # The ring of both ranks keeps its place after the slot before it; behind it each rank closes up.
    assert slots.tolist() == [1, 2, 2, 0]
