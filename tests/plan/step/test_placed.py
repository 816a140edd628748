"""A plan in arrays against the same plan built sequence by sequence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from bytescale_ext.errors import PlanError
from bytescale_ext.plan.step import table
from bytescale_ext.plan.step.check import check_step_plan
from bytescale_ext.plan.step.micro_batch import MicroBatch, Shard, zigzag_bounds, zigzag_ranges
from bytescale_ext.plan.step.placed import PlacedRanks, micro_batch_counts
from bytescale_ext.plan.step.plan import StepPlan
from tests.plan.hdp.aligned.random_plans import random_plan

SEEDS = range(25)


def integers(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def random_placed(seed: int, **changes: Any) -> PlacedRanks:
    random = np.random.default_rng(seed)
    num_ranks, count = int(random.integers(1, 9)), int(random.integers(0, 25))
    widths = random.integers(1, num_ranks + 1, count)
    settings: dict[str, Any] = {
        "num_ranks": num_ranks,
        "lengths": widths + random.integers(0, 60, count),
        "first_ranks": random.integers(0, num_ranks - widths + 1),
        "widths": widths,
        "orders": random.integers(0, 7, count),
        "aligned": bool(seed % 2),
        "offloads": random.random(count) if seed % 3 else None,
    }
    return PlacedRanks(**settings | changes)


def built(placed: PlacedRanks) -> tuple[tuple[MicroBatch, ...], ...]:
    """Return the same ranks by the definition of the class, from all orders of all ranks."""
    ranks = []
    for rank in range(placed.num_ranks):
        here = [
            seq
            for seq, (first, width) in enumerate(zip(placed.first_ranks, placed.widths, strict=True))
            if first <= rank < first + width
        ]
        last = max((int(placed.orders[seq]) for seq in here), default=-1)
        row = []
        for order in range(last + 1):
            held = [seq for seq in here if placed.orders[seq] == order]
            if held or placed.aligned:
                row.append(micro_batch_of(placed, held, rank))
        ranks.append(tuple(row))
    return tuple(ranks)


def micro_batch_of(placed: PlacedRanks, held: list[int], rank: int) -> MicroBatch:
    shards = []
    for seq in sorted(held, key=lambda seq: (placed.widths[seq] == 1, seq)):
        first, width = int(placed.first_ranks[seq]), int(placed.widths[seq])
        ranges = zigzag_ranges(int(placed.lengths[seq]), width, rank - first)
        shards.append(Shard(seq, ranges, tuple(range(first, first + width))))
    offloads = [] if placed.offloads is None else [float(placed.offloads[seq]) for seq in held]
    return MicroBatch(tuple(shards), max(offloads, default=0.0))


@pytest.mark.parametrize("seed", SEEDS)
def test_ranks_are_those_of_the_definition(seed: int) -> None:
    placed = random_placed(seed)
    assert tuple(placed) == built(placed)
    assert placed.counts.tolist() == [len(row) for row in built(placed)]


@pytest.mark.parametrize("seed", [1, 4, 5])
def test_indices_and_slices_are_those_of_a_tuple(seed: int) -> None:
    placed = random_placed(seed)
    whole, count = built(placed), placed.num_ranks
    assert len(placed) == count
    for rank in range(-count, count):
        assert placed[rank] == whole[rank]
    for part in (
        slice(None),
        slice(1, None),
        slice(None, -1),
        slice(None, None, 2),
        slice(None, None, -1),
        slice(9, 2),
    ):
        assert placed[part] == whole[part]
    for outside in (count, -count - 1):
        with pytest.raises(IndexError, match=f"rank {outside} of {count}"):
            placed[outside]


def test_plans_are_equal_by_what_they_hold() -> None:
    placed = random_placed(4)
    assert placed == random_placed(4)
    assert placed == built(placed)
    assert placed == list(built(placed))
    assert placed != built(placed)[:-1]
    assert placed != random_placed(4, offloads=None)
    assert placed != random_placed(4, lengths=placed.lengths + 1)
    assert placed != 5
    with pytest.raises(TypeError, match="unhashable"):
        hash(placed)


def test_orders_of_other_numbers_are_the_same_plan_where_holes_are_left_out() -> None:
    placed = random_placed(4)
    spread = random_placed(4, orders=3 * placed.orders + 2)
    assert not placed.aligned
    assert spread == placed
    aligned = random_placed(4, orders=3 * placed.orders + 2, aligned=True)
    assert aligned != placed
    without_holes = tuple(tuple(one for one in row if one.shards) for row in aligned)
    assert without_holes == tuple(placed)


def test_one_rank_of_many_is_made_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    count = 50_000
    ones = np.ones(count, dtype=np.int64)
    placed = PlacedRanks(count // 10, 8 * ones, np.arange(count) // 10, ones, np.arange(count) % 10)
    made = []
    monkeypatch.setattr(table, "Shard", lambda seq, *values: made.append(seq) or Shard(seq, *values))
    assert len(placed) == 5000
    assert placed.counts.sum() == count
    assert not made
    assert len(placed[17]) == 10
    assert made == list(range(170, 180))


def test_bounds_of_many_shards_are_those_of_each() -> None:
    rows = [(length, width, member) for width in (1, 2, 3, 5, 8) for length in range(1, 40) for member in range(width)]
    bounds = zigzag_bounds(*np.array(rows, dtype=np.int64).T)
    for row, (length, width, member) in zip(bounds.tolist(), rows, strict=True):
        kept = tuple((start, stop) for start, stop in row if stop > start)
        assert kept == zigzag_ranges(length, width, member)


def test_the_check_reads_the_table_that_ranks_run() -> None:
    """A wrong column changes the micro-batches of a rank, and the check refuses it."""
    plan = random_plan(np.random.default_rng(3), 6, 5, aligned=True)
    placed = plan.ranks
    assert isinstance(placed, PlacedRanks)
    check_step_plan(plan)
    shard = int(np.flatnonzero(placed.table.num_ranges == 2)[0])
    stops = placed.table.stops.copy()
    stops[placed.table.first_ranges[shard]] -= 1
    rank, index = placed.table.where(shard)
    broken = replace(placed)
    broken.__dict__["table"] = replace(placed.table, stops=stops)
    assert broken[rank][index].num_tokens == placed[rank][index].num_tokens - 1
    with pytest.raises(PlanError, match="are on no rank"):
        check_step_plan(replace(plan, ranks=broken))


@pytest.mark.parametrize("aligned", [True, False])
def test_plans_come_back_from_json_as_they_were(aligned: bool) -> None:
    plan = random_plan(np.random.default_rng(3), 6, 5, aligned)
    back = StepPlan.from_json(plan.to_json())
    assert not isinstance(back.ranks, PlacedRanks)
    assert plan.ranks == back.ranks
    assert back.aligned == aligned
    assert back.digest() == plan.digest()


def test_counts_are_at_least_one_equal_among_experts_and_whole_groups() -> None:
    placed = PlacedRanks(4, np.array([5, 5, 5]), np.array([0, 0, 2]), np.array([1, 2, 1]), np.array([0, 2, 1]), True)
    for ranks in (placed, tuple(placed)):
        plan = StepPlan(4, 8, (5, 5, 5), ranks, aligned=True)
        assert micro_batch_counts(plan) == (3, 3, 2, 1)
        assert micro_batch_counts(plan, expert_parallel=2) == (3, 3, 2, 2)
        assert micro_batch_counts(plan, expert_parallel=4) == (3, 3, 3, 3)
        assert micro_batch_counts(plan, multiple=2) == (4, 4, 2, 2)
