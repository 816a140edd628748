"""Arrangements of aligned slots: rings on shelves, short sequences around them, no empty slot."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from bytescale_ext.plan.cost.cost_model import CostModel, StageCost
from bytescale_ext.plan.hdp.aligned import build
from bytescale_ext.plan.hdp.aligned.arrangements import STARTS, Arrangement
from bytescale_ext.plan.hdp.aligned.build import (
    ShelvedRings,
    _short_slots,
    compact_slots,
    place_shorts,
    sequence_seconds,
    shelve,
)
from bytescale_ext.plan.hdp.aligned.clock import SequenceSeconds
from bytescale_ext.plan.hdp.aligned.shelving import Shelver
from bytescale_ext.plan.hdp.aligned.step import AlignedStep
from bytescale_ext.plan.hdp.problem import Problem
from bytescale_ext.plan.step.check import check_step_plan
from bytescale_ext.plan.step.plan import StepPlan
from bytescale_ext.plan.step.sizes import ONE_SLICE, Cluster

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

STAGE = StageCost(CostModel(a=0.01, b=1.0, c=0.3, g=2.0), CostModel(a=0.025, b=2.0, c=0.6, g=2.0))


def random_step(seed: int, num_ranks: int = 8, capacity: int = 64) -> AlignedStep:
    random = np.random.default_rng(seed)
    lengths = np.sort(np.minimum(np.exp(random.normal(3, 1.4, 60)) + 1, num_ranks * capacity).astype(np.int64))[::-1]
    return AlignedStep(Problem(lengths, -(-lengths // capacity), Cluster(num_ranks, capacity), (STAGE,) * 3))


@pytest.mark.slow
def test_every_arrangement_is_a_valid_plan() -> None:
    for seed in range(12):
        step = random_step(seed)
        for arrangement in STARTS:
            shelved = shelve(step, [Shelver(step)(arrangement)])
            placed, seconds = place_shorts(step, shelved, shelved.loads)
            lengths = tuple(placed.lengths.tolist())
            check_step_plan(StepPlan(8, 64, lengths, placed, aligned=True), lengths)
            assert seconds.shape == (8,)
            assert (seconds >= 0).all()


def test_rings_of_a_shelf_have_one_slot_and_ranks_of_their_own() -> None:
    step = random_step(3)
    shelving = Shelver(step)(STARTS[0])
    rings = shelve(step, [shelving]).rings
    slots = dict(zip(rings.seqs.tolist(), rings.slots.tolist(), strict=True))
    assert len(slots) == shelving.num_rings
    for span in (filled.span for filled in shelving.spans):
        for shelf in span.shelves:
            assert len({slots[ring] for ring in shelf.rings.tolist()}) == 1
            held = [
                rank
                for first, width in zip(shelf.first_ranks.tolist(), shelf.widths.tolist(), strict=True)
                for rank in range(first, first + width)
            ]
            assert len(held) == len(set(held))
            assert span.first <= min(held)
            assert max(held) < span.stop


def test_slots_without_use_are_left_out() -> None:
    spans = np.zeros(2, dtype=np.int64)
    firsts, widths = np.array([0, 0, 1, 0]), np.array([2, 1, 1, 1])
    slots = compact_slots(firsts, np.array([5, 9, 7, 3]), widths, spans)
    # The ring of both ranks stays after the slot before it. After the ring each rank removes its empty slots.
    assert slots.tolist() == [1, 2, 2, 0]


def test_arrangements_side_by_side_are_built_as_each_by_itself() -> None:
    for seed in (1, 5):
        step = random_step(seed)
        shelvings = [Shelver(step)(arrangement) for arrangement in STARTS]
        together = shelve(step, shelvings)
        placed, seconds = place_shorts(step, together, together.estimates)
        for number, shelving in enumerate(shelvings):
            shelved = shelve(step, [shelving])
            alone, own_seconds = place_shorts(step, shelved, shelved.estimates)
            seqs, ranks = slice(60 * number, 60 * number + 60), slice(8 * number, 8 * number + 8)
            assert (placed.first_ranks[seqs] - 8 * number).tolist() == alone.first_ranks.tolist()
            assert placed.widths[seqs].tolist() == alone.widths.tolist()
            assert placed.orders[seqs].tolist() == alone.orders.tolist()
            assert seconds[ranks] == pytest.approx(own_seconds)


def test_a_arrangement_with_too_little_room_gets_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank has twenty full micro-batches; micro-batches of four times as many tokens would be five."""
    lengths = np.full(160, 64)
    step = AlignedStep(Problem(lengths, np.ones_like(lengths), Cluster(8, 64), (STAGE,) * 3))
    small, large = (Shelver(step)(Arrangement(height=100.0, pack=pack)) for pack in (1.0, 4.0))
    shelved = shelve(step, [small, large])
    tried: list[list[float]] = []

    def noted(step: AlignedStep, shelved: ShelvedRings, owners: Ints, rooms: Floats) -> Ints:
        tried.append(rooms.tolist())
        return _short_slots(step, shelved, owners, rooms)

    monkeypatch.setattr(build, "_ROOMS", (0.1, 1.0))
    monkeypatch.setattr(build, "_short_slots", noted)
    placed, _ = place_shorts(step, shelved, shelved.estimates)
    assert tried == [[0.1] * 16, [0.1] * 8 + [1.0] * 8]
    both = tuple(placed.lengths.tolist())
    check_step_plan(StepPlan(16, 64, both, placed, aligned=True), both)


def test_the_seconds_of_arrangements_are_those_of_their_placement() -> None:
    step = random_step(4)
    shelved = shelve(step, [Shelver(step)(arrangement) for arrangement in STARTS[:3]])
    placed, _ = place_shorts(step, shelved, shelved.estimates)
    known, found = sequence_seconds(step, shelved), SequenceSeconds.of(placed, STAGE, ONE_SLICE)
    in_order = np.argsort(known.rings)
    assert known.rings[in_order].tolist() == found.rings.tolist()
    assert known.overheads.tolist() == found.overheads.tolist()
    np.testing.assert_allclose(known.local, found.local)
    np.testing.assert_allclose(known.ring_slices[:, in_order], found.ring_slices)
