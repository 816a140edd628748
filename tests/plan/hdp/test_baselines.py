from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bytescale_ext.plan.step.check import check_step_plan
from bytescale_ext.plan.step.plan import StepPlan
from tests.plan.simple_plans import plan_naive, plan_static
from tests.sample import examples


def rings_of(plan: StepPlan) -> dict[int, tuple[int, ...]]:
    return {shard.seq: shard.ring for rank in plan.ranks for micro_batch in rank for shard in micro_batch.shards}


@settings(max_examples=examples(150), deadline=None)
@given(st.data())
def test_naive_plans_keep_every_law(data: st.DataObject) -> None:
    num_ranks = data.draw(st.integers(1, 12))
    multiple = data.draw(st.sampled_from([1, 2, 4]))
    capacity = multiple * data.draw(st.integers(1, 30))
    lengths = data.draw(st.lists(st.integers(1, num_ranks * capacity), max_size=50))
    plan = plan_naive(lengths, num_ranks, capacity, multiple)
    check_step_plan(plan, lengths, multiple)
    for seq, ring in rings_of(plan).items():
        assert len(ring) == -(-lengths[seq] // capacity)


@pytest.mark.slow
@settings(max_examples=examples(100), deadline=None)
@given(st.data())
def test_static_plans_keep_every_law(data: st.DataObject) -> None:
    width, num_groups = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 4))
    capacity = data.draw(st.integers(1, 30))
    lengths = data.draw(st.lists(st.integers(1, width * capacity), max_size=50))
    plan = plan_static(lengths, width * num_groups, capacity, width)
    check_step_plan(plan, lengths)
    for seq, ring in rings_of(plan).items():
        assert len(ring) == min(width, lengths[seq])
        assert ring[0] % width == 0


def test_a_small_plan_by_hand() -> None:
    plan = plan_naive([3, 20, 9, 4, 12], 4, 8)
    # seq 1 (20 tokens, 3 ranks) on 0-2; seq 4 (12, 2 ranks): windows 0-1, 1-2 have maximum 7, 2-3 has 6
    # seq 2 (9, 2 ranks): loads 7 7 12 6, window 0-1; then the pack of 4 + 3: rank 3 has 6 tokens
    assert rings_of(plan) == {1: (0, 1, 2), 4: (2, 3), 2: (0, 1), 3: (3,), 0: (3,)}
    assert [[[shard.seq for shard in mb.shards] for mb in rank] for rank in plan.ranks] == [
        [[1], [2]],
        [[1], [2]],
        [[1], [4]],
        [[4], [0, 3]],
    ]
    assert plan.ranks[0][0].shards[0].ranges == ((0, 4), (17, 20))


def test_the_order_of_input_changes_only_names() -> None:
    lengths = [30, 7, 55, 8, 8, 2, 19]
    plan = plan_naive(lengths, 6, 10)
    assert plan.digest() == plan_naive(np.array(lengths, dtype=np.int32), 6, 10).digest()  # type: ignore[arg-type]
    turned = plan_naive(lengths[::-1], 6, 10)
    assert [[mb.num_tokens for mb in rank] for rank in turned.ranks] == [
        [mb.num_tokens for mb in rank] for rank in plan.ranks
    ]


def test_plans_do_not_change_unnoticed() -> None:
    lengths = np.random.default_rng(7).integers(1, 6000, 300).tolist()
    assert plan_naive(lengths, 16, 2048, 8).digest() == "869c8a701c13e21d"
    assert plan_static(lengths, 16, 2048, 4).digest() == "2d63ffc195301c87"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (([5, 81, 3], 4, 20), "sequence 1 has 81 tokens.*at least 21"),
        (([5, 81, 3], 4, 20, 4), "sequence 1 has 81 tokens.*at least 24"),
        (([5, 0, 3], 4, 20), "sequence 1 has 0 tokens"),
        (([5, -2], 4, 20), "sequence 1 has -2 tokens"),
        (([5], 0, 20), "number of ranks is 0"),
        (([5], 4, 0), "tokens per rank is 0"),
        (([5], 4, 20, 0), "tokens multiple is 0"),
        (([5], 4, 20, 8), "20 is not a multiple of 8.*use 24"),
    ],
)
def test_bad_input_is_named(arguments: tuple[list[int], int, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        plan_naive(*arguments)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (([5], 4, 20, 3), "width 3 does not divide 4"),
        (([5], 4, 20, 0), "width 0 does not divide 4"),
        (([5, 41], 4, 20, 2), "sequence 1 has 41 tokens.*at least 21"),
        (([0], 4, 20, 2), "sequence 0 has 0 tokens"),
    ],
)
def test_bad_static_input_is_named(arguments: tuple[list[int], int, int, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        plan_static(*arguments)
