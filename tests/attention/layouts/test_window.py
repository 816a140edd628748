"""Passes of sequences longer than the window: rows, messages and blocks, without tensors."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

import pytest

from bytescale_ext.attention.layouts.layout import attention_layout
from bytescale_ext.attention.layouts.route import Route
from bytescale_ext.attention.layouts.rows import Rows
from bytescale_ext.attention.layouts.window import WindowPass, WindowSequence, is_limited, window_pass
from bytescale_ext.plan.step.micro_batch import MicroBatch, Shard, zigzag_ranges
from tests.attention.layouts.test_slice_pairs import pick, rows_of
from tests.sample import seeds

RING = (3, 4, 5, 6)


def passes_of(ends: tuple[int, ...], window: int, width: int = 4) -> list[WindowPass]:
    """Return the pass of each member, for one sequence up to the end of its last slice."""
    sequences = [WindowSequence(0, ends, 0)]
    return [window_pass(sequences, Route(RING[:width], member), Rows(()), window) for member in range(width)]


def test_the_example_of_the_module() -> None:
    """Pass of the member with the tokens 4-7 and 24-27 of 32, with a window of 6."""
    found = passes_of((32,), 6)[1]
    assert found.num_keys == 18
    assert (found.own[0].intervals, found.own[1].intervals) == (((0, 8),), ((4, 8), (14, 18)))
    receives, sends = ([(rank, rows.intervals) for rank, rows in one] for one in (found.receives, found.sends))
    assert receives == [(3, ((0, 4),)), (5, ((10, 14),)), (6, ((8, 10),))]
    # Tokens 8-11 of rank 5 need 2-7, 12-15 of rank 6 need 6-7, and 28-31 of rank 3 need 22-27.
    assert sends == [(3, ((4, 8),)), (5, ((0, 4),)), (6, ((2, 4),))]
    first, second = found.blocks
    assert (first.queries.intervals, first.keys.intervals) == (((0, 4),), ((0, 8),))
    assert (second.queries.intervals, second.keys.intervals) == (((4, 8),), ((8, 18),))
    assert (first.window, second.window) == (6, 6)


@pytest.mark.parametrize("seed", seeds(25))
def test_members_send_what_others_expect_and_see_every_key_of_the_window_once(seed: int) -> None:
    source = random.Random(seed)
    width, window = source.randint(2, 4), source.randint(1, 25)
    inner = sorted(source.randint(0, 60) // (2 * width) * 2 * width for _ in range(source.randint(0, 2)))
    ends = (*inner, max([width, *inner]) + source.randint(0, 30))
    sequence, passes = WindowSequence(0, ends, 0), passes_of(ends, window, width)
    tokens = [[(0, token) for run in sequence.runs(width, member) for token in range(*run)] for member in range(width)]
    pairs: Counter[tuple[int, int]] = Counter()
    for member, found in enumerate(passes):
        pool: list[tuple[int, int] | None] = [None] * found.num_keys
        for rank, rows in [(RING[member], found.own[1]), *found.receives]:
            sender = passes[RING.index(rank)]
            sent = found.own[0] if rank == RING[member] else dict(sender.sends)[RING[member]]
            message = pick(pick(tokens[RING.index(rank)], sender.keys), sent)
            for row, token in zip(rows_of(rows), message, strict=True):
                assert pool[row] is None
                pool[row] = token
        assert pool == sorted(pick(pool, Rows.of([(0, found.num_keys)])))
        queries = [token for run in sequence.own_runs(width, member) for token in range(*run)]
        for block in found.blocks:
            rows_q, rows_k = rows_of(block.queries), rows_of(block.keys)
            bounds = zip(pairwise(block.cu_q.offsets), pairwise(block.cu_k.offsets), strict=True)
            for (first, last), (begin, end) in bounds:
                of_run = [queries[row] for row in rows_q[first:last]]
                keys = [token for _, token in pick(pool, Rows.of([(row, row + 1) for row in rows_k[begin:end]]))]
                assert of_run == keys[len(keys) - len(of_run) :]
                pairs.update((query, key) for query in of_run for key in keys if query - window <= key <= query)
    start = ends[-2] if len(ends) > 1 else 0
    assert pairs == Counter(
        (query, key) for query in range(start, ends[-1]) for key in range(max(0, query - window), query + 1)
    )


def test_ranks_of_a_ring_have_equal_passes_in_one_order() -> None:
    """Sequences longer than the window come first, then the other sequences of their ring."""
    lengths, ring, orders = (40, 9, 30, 8, 50), (0, 1), []
    for rank in ring:
        shards = [Shard(seq, zigzag_ranges(length, 2, rank), ring) for seq, length in enumerate(lengths)]
        micro_batch = MicroBatch(tuple(shards))
        layout = attention_layout(micro_batch, rank, lengths, micro_batch.num_tokens, 10)
        orders.append(([one.seqs for one in layout.windows], [one.seqs for one in layout.passes]))
    assert orders == [([(0, 2, 4)], [(1, 3)])] * 2


def test_sequences_within_the_window_are_not_limited() -> None:
    assert [is_limited(length, 10) for length in (10, 11, 12)] == [False, False, True]
    assert not is_limited(1000, None)
