"""The validator refuses exactly the plans with a deadlock."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bytescale_ext.errors import PlanError
from bytescale_ext.plan.step.check import check_step_plan
from bytescale_ext.plan.step.micro_batch import MicroBatch, Shard, zigzag_ranges
from bytescale_ext.plan.step.plan import StepPlan
from tests.plan.simple_plans import plan_naive
from tests.plan.step.broken_plans import good_rows, plan_of, swap_shared_micro_batches
from tests.sample import examples


def test_a_deadlock_names_its_cycle() -> None:
    rows = good_rows()
    swap_shared_micro_batches(rows)
    with pytest.raises(PlanError) as caught:
        check_step_plan(plan_of(rows))
    first = str(caught.value).splitlines()[0]
    assert "rank 0 runs micro-batch 0 before 1" in first
    assert "rank 1 runs micro-batch 0 before 1" in first


def test_a_cycle_over_three_ranks_is_found() -> None:
    """Rank 0 runs 2 before 0, rank 1 runs 0 before 1 before 2, rank 2 runs 1 before 2. Only all three together fail."""
    lengths = (4, 4, 6)
    rings = {0: (0, 1), 1: (1, 2), 2: (0, 1, 2)}

    def part(seq: int, rank: int) -> MicroBatch:
        ring = rings[seq]
        return MicroBatch((Shard(seq, zigzag_ranges(lengths[seq], len(ring), rank - ring[0]), ring),))

    orders = {0: (2, 0), 1: (0, 1, 2), 2: (1, 2)}
    ranks = tuple(tuple(part(seq, rank) for seq in orders[rank]) for rank in range(3))
    with pytest.raises(PlanError, match="deadlock"):
        check_step_plan(StepPlan(3, 4, lengths, ranks))
    orders[0] = (0, 2)
    ranks = tuple(tuple(part(seq, rank) for seq in orders[rank]) for rank in range(3))
    check_step_plan(StepPlan(3, 4, lengths, ranks))


def runs_to_the_end(plan: StepPlan) -> bool:
    """Decide by definition: run any micro-batch whose ring partners are all next on their ranks, until none remains."""
    queues = [list(rank) for rank in plan.ranks]

    def ready(rank: int, seen: set[int]) -> set[int] | None:
        """Return the ranks that run together with ``rank`` now, or None if some rank is not ready."""
        if rank in seen:
            return seen
        seen = seen | {rank}
        for shard in queues[rank][0].shards:
            for other in shard.ring if len(shard.ring) > 1 else ():
                if not queues[other] or shard.seq not in [held.seq for held in queues[other][0].shards]:
                    return None
                grown = ready(other, seen)
                if grown is None:
                    return None
                seen = grown
        return seen

    while True:
        group = next((found for rank in range(len(queues)) if queues[rank] and (found := ready(rank, set()))), None)
        if group is None:
            return not any(queues)
        for rank in group:
            queues[rank].pop(0)


@settings(max_examples=examples(120), deadline=None)
@given(st.lists(st.integers(1, 40), min_size=2, max_size=16), st.integers(2, 5), st.integers(0, 10_000))
def test_deadlocks_are_those_of_the_definition(lengths: list[int], num_ranks: int, seed: int) -> None:
    plan = plan_naive(lengths, num_ranks, 20)
    shuffle = random.Random(seed)
    ranks = [list(rank) for rank in plan.ranks]
    for rank in ranks:
        if shuffle.random() < 0.5:
            shuffle.shuffle(rank)
    plan = replace(plan, ranks=tuple(tuple(rank) for rank in ranks))
    if runs_to_the_end(plan):
        check_step_plan(plan)
    else:
        with pytest.raises(PlanError, match="deadlock"):
            check_step_plan(plan)
