"""The validator: it accepts good plans, and refuses a good plan broken in each way that a law forbids."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bytescale_ext.errors import PlanError
from bytescale_ext.plan.step.check import check_step_plan, groups_of
from bytescale_ext.plan.step.micro_batch import MicroBatch, Shard, zigzag_ranges
from bytescale_ext.plan.step.placed import PlacedRanks
from bytescale_ext.plan.step.plan import StepPlan
from tests.plan.simple_plans import plan_naive

Rows = list[list[list[Shard]]]
LENGTHS = (10, 3, 9, 2, 4, 12, 4)


def member(seq: int, ring: tuple[int, ...], rank: int) -> Shard:
    return Shard(seq, zigzag_ranges(LENGTHS[seq], len(ring), rank - ring[0]), ring)


def local(seq: int, rank: int) -> Shard:
    return Shard(seq, ((0, LENGTHS[seq]),), (rank,))


def good_rows() -> Rows:
    """Four ranks, C = 8: rings of two and three ranks, two rings in one micro-batch, a ring beside a local."""
    pair, triple, last = (0, 1), (0, 1, 2), (2, 3)
    return [
        [[member(0, pair, 0), local(1, 0)], [member(2, triple, 0), member(6, triple, 0)]],
        [[member(0, pair, 1)], [member(2, triple, 1), member(6, triple, 1)]],
        [[member(2, triple, 2), member(6, triple, 2)], [member(5, last, 2)]],
        [[local(3, 3), local(4, 3)], [member(5, last, 3)]],
    ]


def plan_of(rows: Rows, lengths: tuple[int, ...] = LENGTHS) -> StepPlan:
    return StepPlan(4, 8, lengths, tuple(tuple(MicroBatch(tuple(shards)) for shards in rank) for rank in rows))


def drop_a_range(rows: Rows) -> None:
    rows[0][0][0] = replace(rows[0][0][0], ranges=rows[0][0][0].ranges[:1])


def drop_the_last_tokens(rows: Rows) -> None:
    rows[3][0][1] = replace(rows[3][0][1], ranges=((0, 3),))


def drop_a_local_sequence(rows: Rows) -> None:
    del rows[0][0][1]


def drop_a_member(rows: Rows) -> None:
    del rows[3][1]


def overlap_two_members(rows: Rows) -> None:
    rows[1][0][0] = replace(rows[1][0][0], ranges=((2, 5), (5, 7)))


def overlap_in_a_shard(rows: Rows) -> None:
    rows[2][1][0] = replace(rows[2][1][0], ranges=((0, 3), (2, 12)))


def turn_the_ranges(rows: Rows) -> None:
    rows[2][1][0] = replace(rows[2][1][0], ranges=rows[2][1][0].ranges[::-1])


def an_empty_range(rows: Rows) -> None:
    rows[0][0][1] = replace(rows[0][0][1], ranges=((0, 3), (3, 3)))


def outside_the_sequence(rows: Rows) -> None:
    rows[0][0][1] = replace(rows[0][0][1], ranges=((0, 4),))


def below_zero(rows: Rows) -> None:
    rows[0][0][1] = replace(rows[0][0][1], ranges=((-1, 3),))


def a_shard_without_ranges(rows: Rows) -> None:
    rows[0][0].append(Shard(1, (), (0,)))


def a_shard_without_ring(rows: Rows) -> None:
    rows[0][0][1] = replace(rows[0][0][1], ring=())


def an_empty_micro_batch(rows: Rows) -> None:
    rows[3].insert(1, [])


def an_unknown_sequence(rows: Rows) -> None:
    rows[3][0][0] = replace(rows[3][0][0], seq=7)


def a_negative_sequence(rows: Rows) -> None:
    rows[3][0][0] = replace(rows[3][0][0], seq=-1)


def over_capacity(rows: Rows) -> None:
    rows[3][1].append(rows[3][0].pop(1))


def duplicate_a_sequence(rows: Rows) -> None:
    rows[2][1].append(local(3, 2))


def split_on_one_rank(rows: Rows) -> None:
    rows[3][0][1:] = [Shard(4, ((0, 2),), (3,)), Shard(4, ((2, 4),), (3,))]


def wrong_ring_on_one_member(rows: Rows) -> None:
    rows[1][0][0] = replace(rows[1][0][0], ring=(1, 2))


def a_ring_with_a_gap(rows: Rows) -> None:
    for rank in (2, 3):
        rows[rank][1][0] = replace(rows[rank][1][0], ring=(1, 3))


def a_ring_in_descending_order(rows: Rows) -> None:
    for rank in (2, 3):
        rows[rank][1][0] = replace(rows[rank][1][0], ring=(3, 2))


def a_rank_twice_in_a_ring(rows: Rows) -> None:
    for rank in (2, 3):
        rows[rank][1][0] = replace(rows[rank][1][0], ring=(2, 2))


def a_ring_out_of_range(rows: Rows) -> None:
    for rank in (2, 3):
        rows[rank][1][0] = replace(rows[rank][1][0], ring=(3, 4))


def a_holder_outside_its_ring(rows: Rows) -> None:
    rows[3][0][1] = replace(rows[3][0][1], ring=(2,))


def an_absent_member(rows: Rows) -> None:
    for rank in (0, 1):
        rows[rank][0][0] = replace(rows[rank][0][0], ring=(0, 1, 2))


def swap_the_parts_of_two_members(rows: Rows) -> None:
    one, other = rows[2][1][0], rows[3][1][0]
    rows[2][1][0], rows[3][1][0] = replace(one, ranges=other.ranges), replace(other, ranges=one.ranges)


def uneven_shares(rows: Rows) -> None:
    rows[0][0][0] = replace(rows[0][0][0], ranges=((0, 2), (8, 10)))
    rows[1][0][0] = replace(rows[1][0][0], ranges=((2, 5), (5, 8)))


def uneven_halves(rows: Rows) -> None:
    rows[2][1][0] = replace(rows[2][1][0], ranges=((0, 5), (11, 12)))
    rows[3][1][0] = replace(rows[3][1][0], ranges=((5, 8), (8, 11)))


def contiguous_halves(rows: Rows) -> None:
    rows[2][1][0] = replace(rows[2][1][0], ranges=((0, 6),))
    rows[3][1][0] = replace(rows[3][1][0], ranges=((6, 12),))


def three_ranges(rows: Rows) -> None:
    rows[2][1][0] = replace(rows[2][1][0], ranges=((0, 2), (2, 3), (9, 12)))


def two_ranges_of_a_local(rows: Rows) -> None:
    rows[3][0][1] = replace(rows[3][0][1], ranges=((0, 2), (2, 4)))


def ring_after_local(rows: Rows) -> None:
    rows[0][0].reverse()


def rings_out_of_order(rows: Rows) -> None:
    rows[1][1].reverse()


def swap_shared_micro_batches(rows: Rows) -> None:
    rows[1].reverse()


def tie_two_micro_batches(rows: Rows) -> None:
    """Sequence 6 moves beside sequence 0 on one rank, and stays beside sequence 2 on the others."""
    rows[1][0].append(rows[1][1].pop(1))


MUTATIONS: list[tuple[Callable[[Rows], None], str]] = [
    (drop_a_range, r"tokens \[8:10\] of seq 0 are on no rank"),
    (drop_the_last_tokens, r"tokens \[3:4\] of seq 4 are on no rank"),
    (drop_a_local_sequence, "seq 1 of 3 tokens is on no rank"),
    (drop_a_member, r"tokens \[3:9\] of seq 5 are on no rank"),
    (overlap_two_members, r"tokens \[2:3\] of seq 0 are computed twice"),
    (overlap_in_a_shard, "ranges of a shard of seq 5 overlap or descend"),
    (turn_the_ranges, "ranges of a shard of seq 5 overlap or descend"),
    (an_empty_range, r"range \[3:3\] of seq 1 is empty"),
    (outside_the_sequence, r"range \[0:4\] of seq 1 is empty or outside \[0:3\]"),
    (below_zero, r"range \[-1:3\] of seq 1 is empty or outside"),
    (a_shard_without_ranges, "a shard of seq 1 has no token range"),
    (a_shard_without_ring, "a shard of seq 1 has no ring"),
    (an_empty_micro_batch, "rank 3 micro-batch 1 is empty"),
    (an_unknown_sequence, "seq 7 does not exist"),
    (a_negative_sequence, "seq -1 does not exist"),
    (over_capacity, "rank 3 micro-batch 1 has 10 tokens .* more than C = 8"),
    (duplicate_a_sequence, r"tokens \[0:2\] of seq 3 are computed twice"),
    (split_on_one_rank, "rank 3 holds two shards of seq 4"),
    (wrong_ring_on_one_member, "rank 1 has ring 1,2 for seq 0, others have ring 0,1"),
    (a_ring_with_a_gap, "ring 1,3 of seq 5 is not a run"),
    (a_ring_in_descending_order, "ring 3,2 of seq 5 is not a run"),
    (a_rank_twice_in_a_ring, "ring 2,2 of seq 5 is not a run"),
    (a_ring_out_of_range, "ring 3,4 of seq 5 is not a run of contiguous ascending ranks in 0-3"),
    (a_holder_outside_its_ring, "rank 3 holds seq 4 and is not in its ring 2"),
    (an_absent_member, "rank 2 is in ring 0-2 of seq 0 and holds no shard"),
    (swap_the_parts_of_two_members, r"rank 2 does not hold parts 0 and 3 \(of 4\) of seq 5"),
    (uneven_shares, r"rank 0 does not hold parts 0 and 3 \(of 4\) of seq 0"),
    (uneven_halves, "rank 2 does not hold parts 0 and 3"),
    (contiguous_halves, "rank 2 does not hold parts 0 and 3"),
    (three_ranges, "a shard of seq 5 has 3 ranges"),
    (two_ranges_of_a_local, "a shard of seq 4 has 2 ranges, at most 1"),
    (ring_after_local, "the ring shard of seq 0 comes after a local one"),
    (rings_out_of_order, "ring shards of seq 6 and seq 2 are not ordered"),
    (swap_shared_micro_batches, "deadlock"),
    (tie_two_micro_batches, "rank 0 micro-batches 0 and 1 must run at the same time"),
]


def test_the_good_plan_is_accepted() -> None:
    check_step_plan(plan_of(good_rows()), LENGTHS)
    check_step_plan(plan_of(good_rows()), list(LENGTHS), tokens_multiple=4)


@pytest.mark.parametrize(("mutate", "law"), MUTATIONS, ids=[mutate.__name__ for mutate, _ in MUTATIONS])
def test_each_broken_plan_is_refused(mutate: Callable[[Rows], None], law: str) -> None:
    rows = good_rows()
    mutate(rows)
    with pytest.raises(PlanError, match=law) as caught:
        check_step_plan(plan_of(rows))
    lines = str(caught.value).splitlines()
    assert any(line.startswith(">>") for line in lines)
    assert "micro-batch" in lines[1]
    assert lines[-1].startswith("7 sequences")


@pytest.mark.parametrize(("mutate", "law"), MUTATIONS, ids=[mutate.__name__ for mutate, _ in MUTATIONS])
def test_the_marked_rows_are_those_that_changed(mutate: Callable[[Rows], None], law: str) -> None:
    """A marked row names a rank whose micro-batches changed, or one that shares a sequence with them."""
    rows = good_rows()
    mutate(rows)
    held = [[{shard.seq for shards in rank for shard in shards} for rank in each] for each in (rows, good_rows())]
    touched = [rank for rank in range(4) if rows[rank] != good_rows()[rank]]
    changed = set().union(*(each[rank] for each in held for rank in touched))
    partners = {rank for rank in range(4) if held[0][rank] & changed}
    with pytest.raises(PlanError) as caught:
        check_step_plan(plan_of(rows))
    marked = [line.split() for line in str(caught.value).splitlines()[1:] if line.startswith(">>")]
    assert {int(words[1]) for words in marked} <= partners | set(touched)


def test_a_deadlock_names_its_cycle() -> None:
    rows = good_rows()
    swap_shared_micro_batches(rows)
    with pytest.raises(PlanError) as caught:
        check_step_plan(plan_of(rows))
    first = str(caught.value).splitlines()[0]
    assert "rank 0 runs micro-batch 0 before 1" in first
    assert "rank 1 runs micro-batch 0 before 1" in first


def test_a_cycle_over_three_ranks_is_found() -> None:
    """Rank 0 runs 2 before 0, rank 1 runs 0 before 1 before 2, rank 2 runs 1 before 2: only 0-1-2 together fail."""
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
    """The definition: run any micro-batch all of whose ring partners are next on their ranks, until none is left."""
    queues = [list(rank) for rank in plan.ranks]

    def ready(rank: int, seen: set[int]) -> set[int] | None:
        """Ranks that run together with ``rank`` now; None when one of them is not there yet."""
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


@settings(max_examples=120, deadline=None)
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


@settings(max_examples=120, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=12), st.data())
def test_any_moved_boundary_is_found(lengths: list[int], data: st.DataObject) -> None:
    """Each single change of one number of a plan breaks a law."""
    plan = plan_naive(lengths, 4, 15)
    rank = data.draw(st.sampled_from([rank for rank in range(4) if plan.ranks[rank]]))
    index = data.draw(st.integers(0, len(plan.ranks[rank]) - 1))
    shards = list(plan.ranks[rank][index].shards)
    place = data.draw(st.integers(0, len(shards) - 1))
    ranges = [list(pair) for pair in shards[place].ranges]
    which, end = data.draw(st.integers(0, len(ranges) - 1)), data.draw(st.integers(0, 1))
    ranges[which][end] += data.draw(st.sampled_from([-2, -1, 1, 2]))
    shards[place] = replace(shards[place], ranges=tuple((start, stop) for start, stop in ranges))
    ranks = [list(row) for row in plan.ranks]
    ranks[rank][index] = MicroBatch(tuple(shards))
    with pytest.raises(PlanError):
        check_step_plan(replace(plan, ranks=tuple(tuple(row) for row in ranks)))


def test_padding_counts_against_the_capacity() -> None:
    plan = StepPlan(1, 8, (7,), ((MicroBatch((Shard(0, ((0, 7),), (0,)),)),),))
    check_step_plan(plan, tokens_multiple=8)
    with pytest.raises(PlanError, match="no positive multiple of 3"):
        check_step_plan(plan, tokens_multiple=3)


@pytest.mark.parametrize(
    ("change", "lengths", "law"),
    [
        ({"num_ranks": 5}, None, "for 5 ranks and lists micro-batches of 4"),
        ({"tokens_per_rank": 0}, None, "C = 0"),
        ({"lengths": (10, 3, 9, 2, 4, 12, 0)}, None, "seq 6 has 0 tokens"),
        ({}, (10, 3, 9, 2, 4, 12), "the plan has 7 sequences, the step has 6"),
        ({}, (10, 3, 9, 2, 5, 12, 4), "seq 4 has 4 tokens in the plan and 5 in the step"),
    ],
)
def test_faults_of_the_whole_plan_are_marked_too(
    change: dict[str, int], lengths: tuple[int, ...] | None, law: str
) -> None:
    with pytest.raises(PlanError, match=law) as caught:
        check_step_plan(replace(plan_of(good_rows()), **change), lengths)  # type: ignore[arg-type]
    assert str(caught.value).startswith(">>")


def test_the_message_of_a_large_plan_stays_short() -> None:
    plan = plan_naive([8] * 2000, 50, 8)
    ranks = list(plan.ranks)
    ranks[31] = (ranks[31][0], MicroBatch(ranks[31][1].shards * 2), *ranks[31][2:])
    with pytest.raises(PlanError) as caught:
        check_step_plan(replace(plan, ranks=tuple(ranks)))
    lines = str(caught.value).splitlines()
    assert len(lines) <= 46
    assert [line.split()[1:3] for line in lines if line.startswith(">>")] == [["31", "1"]]


def test_coupled_groups_of_the_good_plan() -> None:
    assert groups_of(plan_of(good_rows())) == [[0, 1], [0, 1], [1, 2], [3, 2]]


def aligned_plan(rows: Rows) -> StepPlan:
    return replace(plan_of(rows), aligned=True)


def test_aligned_slots_may_be_empty_and_must_agree() -> None:
    rows = good_rows()  # ranks 0 and 1 have seq 2 at index 1, rank 2 at index 0
    with pytest.raises(PlanError, match="seq 2 is in micro-batch 1 on rank 1 and 0 on rank 2; aligned slots"):
        check_step_plan(aligned_plan(rows))
    rows[2].insert(0, [])
    with pytest.raises(PlanError, match="seq 5 is in micro-batch 2 on rank 2 and 1 on rank 3; aligned slots"):
        check_step_plan(aligned_plan(rows))
    rows[3].insert(1, [])
    check_step_plan(aligned_plan(rows))
    with pytest.raises(PlanError, match="rank 2 micro-batch 0 is empty"):
        check_step_plan(plan_of(rows))


def test_offloading_counts_the_tokens_that_stay() -> None:
    """Rank 0's first micro-batch with 16 tokens of C = 8: of 10 layers 2 + 8 (1 - r) may keep half: r = 5 / 8."""
    shards = (Shard(0, ((0, 16),), (0,)),)

    def check(offload: float, num_layers: int | None) -> None:
        plan = StepPlan(1, 8, (16,), ((MicroBatch(shards, offload),),))
        check_step_plan(plan, [16], 4, num_layers)

    check(0.625, 10)
    for offload, layers, words in [
        (0.62, 10, "16 tokens .* of which 8 stay on the device, more than C = 8"),
        (0.0, 10, "16 tokens .16 padded., more than C = 8"),
        (0.625, None, "rank 0 micro-batch 0 offloads 0.625 .*the number of layers is not given"),
        (1.0, 2, "more than C = 8"),
        (1.1, 10, "offloads 1.1 .*outside 0 to 1"),
        (-0.1, 10, "offloads -0.1 .*outside 0 to 1"),
        (float("nan"), 10, "offloads nan"),
    ]:
        with pytest.raises(PlanError, match=words):
            check(offload, layers)


def test_plans_kept_as_arrays_are_checked_as_arrays() -> None:
    plan = plan_naive(list(range(1, 400)), 16, 64)
    check_step_plan(plan)
    assert isinstance(plan.ranks, PlacedRanks)
    outside = plan.ranks.first_ranks.copy()
    outside[398] = 10  # 399 tokens need seven ranks
    with pytest.raises((PlanError, IndexError)):
        check_step_plan(replace(plan, ranks=replace(plan.ranks, first_ranks=outside)))
    together = np.zeros_like(plan.ranks.orders)
    with pytest.raises(PlanError, match="more than C = 64"):
        check_step_plan(replace(plan, ranks=replace(plan.ranks, orders=together)))
