"""Layouts: every causal pair of tokens is computed exactly once, by the rank of the query."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import islice, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bytescale_ext.attention.layouts.layout import AttentionLayout, RingPass, attention_layout, ring_pass
from bytescale_ext.attention.layouts.route import Route
from bytescale_ext.attention.layouts.rows import Rows
from bytescale_ext.errors import PlanError
from bytescale_ext.plan.step.micro_batch import MicroBatch, Shard, zigzag_ranges
from tests.attention.cases import GROUPS, MIXED, TINY, Case


def tokens(length: int, width: int, index: int) -> list[int]:
    """Return the tokens of a ring member, in memory order."""
    return [token for start, stop in zigzag_ranges(length, width, index) for token in range(start, stop)]


Pairs = Counter[tuple[tuple[int, int], tuple[int, int]]]


def held(lengths: Sequence[int], width: int, index: int) -> list[tuple[int, int]]:
    """Return ``(sequence, token)`` of the rows of a member, in memory order."""
    return [(seq, token) for seq, length in enumerate(lengths) for token in tokens(length, width, index)]


def rows_of(rows: Rows) -> list[int]:
    return [row for start, stop in rows.intervals for row in range(start, stop)]


def computed_pairs(member: RingPass, lengths: Sequence[int]) -> Pairs:
    """Return ``(query, key)`` of every score that a member computes."""
    mine = held(lengths, member.width, member.index)
    pairs: Pairs = Counter()
    for block in member.blocks:
        theirs = held(lengths, member.width, block.source)
        queries = [mine[row] for row in rows_of(block.queries)]
        keys = [theirs[row] for row in rows_of(block.keys)]
        assert (len(queries), len(keys)) == (block.cu_q.num_tokens, block.cu_k.num_tokens)
        assert block.cu_q.num_documents == block.cu_k.num_documents
        assert all([*block.cu_q.lengths, *block.cu_k.lengths]), "kernels are given no empty document"
        assert not block.causal or block.cu_q == block.cu_k
        for q_rows, k_rows in zip(pairwise(block.cu_q.offsets), pairwise(block.cu_k.offsets), strict=True):
            document = keys[slice(*k_rows)]
            for row, query in enumerate(queries[slice(*q_rows)]):
                pairs.update((query, key) for key in (document[: row + 1] if block.causal else document))
    return pairs


@given(st.lists(st.integers(1, 30), min_size=1, max_size=4), st.integers(1, 7))
def test_blocks_of_a_ring_are_the_causal_triangles_once(lengths: list[int], width: int) -> None:
    """Some documents are shorter than the ring, so some members have none of their tokens."""
    total: Pairs = Counter()
    for index in range(width):
        total += computed_pairs(ring_pass(lengths, Route(tuple(range(width)), index)), lengths)
    triangles = [
        ((seq, query), (seq, key))
        for seq, length in enumerate(lengths)
        for query in range(length)
        for key in range(query + 1)
    ]
    assert total == Counter(triangles)


@given(st.integers(2, 7), st.lists(st.integers(1, 60), min_size=1, max_size=4))
def test_members_agree_on_what_travels(width: int, lengths: list[int]) -> None:
    ring = tuple(range(10, 10 + width))
    members = [ring_pass(lengths, Route(ring, index)) for index in range(width)]
    for index, member in enumerate(members):
        following = members[ring.index(member.route.next_rank)]
        assert following.route.previous_rank == ring[index]
        sent = [block.source for block in member.blocks[:-1]]
        assert sent == [block.source for block in following.blocks[1:]]
        assert member.rows == following.rows
        assert member.shares == following.shares
        assert member.num_rows == len(held(lengths, width, index)) == sum(member.shares[index])
    assert [sum(column) for column in zip(*members[0].shares, strict=True)] == lengths


@pytest.mark.parametrize("case", [MIXED, TINY, GROUPS])
def test_rows_follow_each_other_in_memory_order(case: Case) -> None:
    for number in range(len(case.rounds)):
        for rank in range(case.num_ranks):
            layout = case.layout(number, rank)
            shared = [shard for shard in case.micro_batch(number, rank).shards if len(shard.ring) > 1]
            of_seq = {}
            for member in layout.passes:
                rows = iter(rows_of(member.in_micro_batch))
                of_seq |= {
                    seq: list(islice(rows, share))
                    for seq, share in zip(member.seqs, member.shares[member.index], strict=True)
                }
                assert member.ring[member.index] == rank
                assert next(rows, None) is None
            in_order = [row for shard in shared for row in of_seq.pop(shard.seq)]
            assert not of_seq
            assert in_order == list(range(layout.local_start))
            assert layout.num_tokens == case.micro_batch(number, rank).num_tokens == layout.num_rows - case.num_padding


def test_example_of_three_ranks() -> None:
    member = ring_pass([11], Route((5, 6, 7), 1), seqs=[4], in_micro_batch=Rows.of([(2, 6)]))
    assert member.rows == (4, 4, 3)
    assert member.shares == ((4,), (4,), (3,))
    assert member.seqs == (4,)
    described = [(b.source, b.queries.intervals, b.keys.intervals, b.causal) for b in member.blocks]
    assert described == [
        (1, ((0, 4),), ((0, 4),), True),
        (2, ((2, 4),), ((0, 3),), False),
        (0, ((0, 4),), ((0, 2),), False),
    ]
    assert (member.route.next_rank, member.route.previous_rank) == (5, 7)
    assert [b.cu_q.offsets for b in member.blocks] == [(0, 4), (0, 2), (0, 4)]


@pytest.mark.slow
def test_keys_visit_every_member_once_and_never_go_further_than_two_ranks() -> None:
    peers: dict[int, set[int]] = {}
    for width in range(2, 17):
        for first in range(0, 40 - width, 5):
            ring = tuple(range(first, first + width))
            members = [ring_pass([width], Route(ring, index)) for index in range(width)]
            for rank, member in zip(ring, members, strict=True):
                assert sorted(block.source for block in member.blocks) == list(range(width))
                assert member.blocks[0].source == member.index == member.source(0) == member.source(width)
                peers.setdefault(rank, set()).update((member.route.next_rank, member.route.previous_rank))
    assert all(found <= {rank - 2, rank - 1, rank + 1, rank + 2} for rank, found in peers.items())
    assert max(map(len, peers.values())) == 4


def test_example_of_two_sequences() -> None:
    member = ring_pass([11, 2], Route((0, 1, 2), 1))
    assert member.rows == (5, 5, 3)
    assert member.shares == ((4, 1), (4, 1), (3, 0))
    described = [(b.source, b.queries.intervals, b.keys.intervals) for b in member.blocks]
    assert described == [
        (1, ((0, 5),), ((0, 5),)),
        (2, ((2, 4),), ((0, 3),)),  # the second sequence has no back part here
        (0, ((0, 5),), ((0, 2), (4, 5))),  # the front parts of both
    ]
    assert [(b.cu_q.offsets, b.cu_k.offsets) for b in member.blocks] == [
        ((0, 4, 5), (0, 4, 5)),
        ((0, 2), (0, 3)),
        ((0, 4, 5), (0, 2, 3)),
    ]


def local(seq: int, length: int, rank: int = 0) -> Shard:
    return Shard(seq, ((0, length),), (rank,))


def shared(seq: int, length: int, ring: tuple[int, ...], rank: int) -> Shard:
    return Shard(seq, zigzag_ranges(length, len(ring), ring.index(rank)), ring)


def layout_of(*shards: Shard, num_rows: int = 64) -> AttentionLayout:
    return attention_layout(MicroBatch(shards), 0, (9, 10, 11), num_rows)


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        ((local(0, 9), shared(1, 10, (0, 1), 0)), "before local"),
        ((shared(2, 11, (0, 1), 0), shared(1, 10, (0, 1), 0)), "ascending"),
        ((shared(1, 10, (1, 2), 1),), "in the ring once"),
        ((Shard(1, ((0, 5),), (0, 1)),), r"must hold \(\(0, 3\), \(8, 10\)\)"),
        ((shared(1, 10, (0, 1), 1),), "must hold"),
        ((local(0, 9, rank=3),), "one token range on rank 0"),
        ((Shard(0, ((0, 2), (4, 9)), (0,)),), "one token range"),
    ],
)
def test_a_broken_micro_batch_is_refused(shards: tuple[Shard, ...], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        layout_of(*shards)


def test_too_few_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="9 tokens does not fit in 8 rows"):
        layout_of(local(0, 9), num_rows=8)
