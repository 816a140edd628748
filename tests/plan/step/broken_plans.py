"""A valid plan, and a damaged plan for each rule of the validator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from bytescale_ext.plan.step.micro_batch import MicroBatch, Shard, zigzag_ranges
from bytescale_ext.plan.step.plan import StepPlan

Rows = list[list[list[Shard]]]
LENGTHS = (10, 3, 9, 2, 4, 12, 4)


def member(seq: int, ring: tuple[int, ...], rank: int) -> Shard:
    return Shard(seq, zigzag_ranges(LENGTHS[seq], len(ring), rank - ring[0]), ring)


def local(seq: int, rank: int) -> Shard:
    return Shard(seq, ((0, LENGTHS[seq]),), (rank,))


def good_rows() -> Rows:
    """Return a plan of four ranks with C = 8.

    It has rings of two and three ranks, two rings in one micro-batch, and a ring with a local sequence.
    """
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
    """Sequence 6 moves to the micro-batch of sequence 0 on one rank, and stays with sequence 2 on the others."""
    rows[1][0].append(rows[1][1].pop(1))


def other_form_on_one_member(rows: Rows) -> None:
    rows[0][0][0] = replace(rows[0][0][0], inner_rings=2)


def with_uneven_ring(rows: Rows) -> None:
    """Give the members of sequence 0 four and six of its tokens. The plan stays valid."""
    rows[0][0][0] = replace(rows[0][0][0], ranges=((0, 2), (8, 10)), shares=(4, 6))
    rows[1][0][0] = replace(rows[1][0][0], ranges=((2, 5), (5, 8)), shares=(4, 6))


def shares_on_one_member(rows: Rows) -> None:
    rows[0][0][0] = replace(rows[0][0][0], shares=(5, 5))


def shares_of_more_tokens(rows: Rows) -> None:
    for rank in (0, 1):
        rows[rank][0][0] = replace(rows[rank][0][0], shares=(6, 5))


def shares_that_no_member_holds(rows: Rows) -> None:
    for rank in (0, 1):
        rows[rank][0][0] = replace(rows[rank][0][0], shares=(6, 4))


def shares_of_one_rank(rows: Rows) -> None:
    rows[3][0][0] = replace(rows[3][0][0], shares=(rows[3][0][0].num_tokens,))


def inner_rings_of_unequal_sizes(rows: Rows) -> None:
    for rank in (0, 1, 2):
        rows[rank][-1 if rank < 2 else 0][0] = replace(rows[rank][-1 if rank < 2 else 0][0], inner_rings=2)


def inner_rings_of_one_rank(rows: Rows) -> None:
    for rank in (2, 3):
        rows[rank][1][0] = replace(rows[rank][1][0], inner_rings=2)


def no_inner_rings(rows: Rows) -> None:
    rows[3][0][0] = replace(rows[3][0][0], inner_rings=0)


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
    (shares_on_one_member, "the shares 5,5 of seq 0 of 10 tokens do not fit its ring"),
    (shares_of_more_tokens, "the shares 6,5 of seq 0 of 10 tokens do not fit its ring"),
    (shares_of_one_rank, "of seq 3 of 2 tokens do not fit its ring"),
    (shares_that_no_member_holds, r"rank 0 does not hold parts 0 and 3 \(of 4\) of seq 0"),
    (uneven_halves, "rank 2 does not hold parts 0 and 3"),
    (contiguous_halves, "rank 2 does not hold parts 0 and 3"),
    (three_ranges, "a shard of seq 5 has 3 ranges"),
    (two_ranges_of_a_local, "a shard of seq 4 has 2 ranges, at most 1"),
    (ring_after_local, "the ring shard of seq 0 comes after a local one"),
    (rings_out_of_order, "ring shards of seq 6 and seq 2 are not ordered"),
    (other_form_on_one_member, "2 inner rings of ring 0,1 of seq 0: ranks name different numbers"),
    (inner_rings_of_unequal_sizes, "2 inner rings of ring 0-2 of seq 2: inner rings must have equal sizes"),
    (inner_rings_of_one_rank, "2 inner rings of ring 2,3 of seq 5: inner rings must have equal sizes"),
    (no_inner_rings, "0 inner rings of ring 3 of seq 3: inner rings must have equal sizes"),
    (swap_shared_micro_batches, "deadlock"),
    (tie_two_micro_batches, "rank 0 micro-batches 0 and 1 must run at the same time"),
]
