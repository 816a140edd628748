from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bytescale_ext.plan.cost.cost_model import CostModel
from bytescale_ext.plan.evaluate.replay import replay, summarize
from bytescale_ext.plan.step.micro_batch import MicroBatch, Shard, zigzag_ranges
from bytescale_ext.plan.step.plan import StepPlan
from tests.plan.simple_plans import plan_naive
from tests.sample import examples

PER_TOKEN = CostModel(a=0.0, b=1.0)


def local(seq: int, length: int, rank: int) -> MicroBatch:
    return MicroBatch((Shard(seq, ((0, length),), (rank,)),))


def ring(seq: int, length: int, ranks: tuple[int, ...], rank: int) -> MicroBatch:
    return MicroBatch((Shard(seq, zigzag_ranges(length, len(ranks), rank - ranks[0]), ranks),))


def joined_plan() -> StepPlan:
    """Rank 0: 3 tokens, then the ring; rank 1: the ring, then 2 tokens; rank 2: nothing."""
    return StepPlan(
        3,
        8,
        (3, 8, 2),
        ((local(0, 3, 0), ring(1, 8, (0, 1), 0)), (ring(1, 8, (0, 1), 1), local(2, 2, 1)), ()),
    )


def test_a_ring_waits_for_its_last_member() -> None:
    result = replay(joined_plan(), PER_TOKEN)
    assert result.starts == ((0.0, 3.0), (3.0, 7.0), ())
    assert result.stops == ((3.0, 7.0), (7.0, 9.0), ())
    assert result.rank_seconds == (7.0, 6.0, 0.0)
    assert result.finish_seconds == (7.0, 9.0, 0.0)
    assert result.makespan == 9.0
    assert result.imbalance == pytest.approx(9.0 / (13.0 / 3))


def test_members_stop_together_with_the_slowest() -> None:
    plan = StepPlan(2, 8, (5,), ((ring(0, 5, (0, 1), 0),), (ring(0, 5, (0, 1), 1),)))
    result = replay(plan, PER_TOKEN)
    assert result.stops == ((3.0,), (3.0,))
    assert result.rank_seconds == (3.0, 2.0)


def test_two_rings_through_one_micro_batch_start_together() -> None:
    middle = MicroBatch((ring(0, 4, (0, 1), 1).shards[0], ring(1, 4, (1, 2), 1).shards[0]))
    plan = StepPlan(3, 8, (4, 4, 5), ((ring(0, 4, (0, 1), 0),), (middle,), (local(2, 5, 2), ring(1, 4, (1, 2), 2))))
    assert replay(plan, PER_TOKEN).starts == ((5.0,), (5.0,), (0.0, 5.0))


def test_a_deadlock_is_refused() -> None:
    one, two = (ring(0, 4, (0, 1), rank) for rank in (0, 1))
    three, four = (ring(1, 4, (0, 1), rank) for rank in (0, 1))
    with pytest.raises(ValueError, match="deadlocks"):
        replay(StepPlan(2, 8, (4, 4), ((one, three), (four, two))), PER_TOKEN)


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.integers(1, 120), min_size=1, max_size=40), st.integers(12, 16))
def test_replay_of_a_plan_is_a_schedule(lengths: list[int], num_ranks: int) -> None:
    plan = plan_naive(lengths, num_ranks, 10)
    cost = CostModel(a=0.01, b=1.0, c=0.5, g=0.5)
    result = replay(plan, cost)
    ring_starts: dict[int, set[float]] = {}
    for rank, micro_batches in enumerate(plan.ranks):
        ready = 0.0
        for index, micro_batch in enumerate(micro_batches):
            start, stop = result.starts[rank][index], result.stops[rank][index]
            assert start >= ready
            assert stop - start >= cost.micro_batch_cost(micro_batch, plan.lengths) - 1e-9
            ready = stop
            for shard in micro_batch.shards:
                ring_starts.setdefault(shard.seq, set()).add(start)
    assert all(len(starts) == 1 for starts in ring_starts.values())
    assert result.imbalance >= 1 - 1e-9
    assert max(result.rank_seconds) <= result.makespan + 1e-9


def test_summary_by_hand() -> None:
    summary = summarize(joined_plan(), PER_TOKEN, tokens_multiple=4)
    assert summary.micro_batches_per_rank == (2, 2, 0)
    assert summary.tokens_per_rank == (7, 6, 0)
    assert summary.padding_share == pytest.approx(3 / 16)  # 3 -> 4 and 2 -> 4, two of 4
    assert summary.fill_share == pytest.approx(13 / 32)
    assert summary.makespan == 9.0
    assert summary.imbalance == pytest.approx(27 / 13)
