"""States after each token: on any member of a ring, and never from another document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from bytescale_ext.attention.backend import Exchanges
from bytescale_ext.attention.layouts.later import NO_ROW, LaterRows, later_rows
from bytescale_ext.attention.layouts.layout import AttentionLayout, attention_layout
from bytescale_ext.attention.virtual import MailboxComm, mailbox_comms, run_in_turn
from bytescale_ext.plan.step.micro_batch import MicroBatch, Shard

PADDING = 3
END = -1.0


def micro_batch(
    rings: Sequence[tuple[int, ...]], lengths: Sequence[int], rank: int, is_uneven: bool = False
) -> MicroBatch:
    """Return a rank's shards of sequences on rings. Shards of rings with several ranks come first.

    In uneven rings, all members except the first have one token.
    """
    shards = [
        replace(shard, ranges=shard.member_ranges(length, ring.index(rank)))
        for seq, (ring, length) in enumerate(zip(rings, lengths, strict=True))
        if rank in ring
        for others in [(1,) * (len(ring) - 1)]
        for shard in [Shard(seq, (), ring, 1, (length - len(others), *others) if is_uneven and others else ())]
    ]
    held = [shard for shard in shards if shard.num_tokens]
    return MicroBatch(tuple(sorted(held, key=lambda shard: len(shard.ring) == 1)))


def fetch(rows: LaterRows, states: torch.Tensor, comm: MailboxComm) -> Exchanges[torch.Tensor]:
    """Return the states after each row, [t, count, h]; ``END`` past the end of a document."""
    pending, table = rows.start(states, comm.exchange)
    if pending is not None:
        yield pending
    found = table[rows.rows.clamp_min(0)]
    return found.masked_fill((rows.rows == NO_ROW).unsqueeze(-1), END)


def check(rings: Sequence[tuple[int, ...]], lengths: Sequence[int], count: int, is_uneven: bool = False) -> None:
    """Compare the later states of each rank with the sequences. The state of token t of sequence s is [s, t]."""
    num_ranks = max(max(ring) for ring in rings) + 1
    comms, steps, wanted = mailbox_comms(num_ranks), [], []
    for rank, comm in enumerate(comms):
        mine = micro_batch(rings, lengths, rank, is_uneven)
        layout: AttentionLayout = attention_layout(mine, rank, lengths, mine.num_tokens + PADDING)
        places = [(shard.seq, t) for shard in mine.shards for start, stop in shard.ranges for t in range(start, stop)]
        states = torch.full((layout.num_rows, 2), 99.0)
        states[: len(places)] = torch.tensor(places, dtype=torch.float32).view(-1, 2)
        steps.append(fetch(later_rows(layout, count), states, comm))
        expected = torch.full((layout.num_rows, count, 2), END)
        for row, (seq, token) in enumerate(places):
            for ahead in range(1, min(count, lengths[seq] - 1 - token) + 1):
                expected[row, ahead - 1] = torch.tensor([float(seq), float(token + ahead)])
        wanted.append(expected)
    for found, expected in zip(run_in_turn(steps), wanted, strict=True):
        assert torch.equal(found, expected)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4), st.integers(8, 40)), max_size=5),
    st.integers(1, 6),
    st.booleans(),
)
def test_states_of_any_rings(cases: list[tuple[int, int, int]], count: int, is_uneven: bool) -> None:
    """Rings have 1 to 4 neighbouring ranks. Ranges may be shorter than the number of later tokens."""
    by_ring = {}
    for first, width, length in cases:
        ring = tuple(range(first, min(4, first + width)))
        by_ring.setdefault(ring, []).append(length)
    rings = [ring for ring in sorted(by_ring, key=len, reverse=True) for _ in by_ring[ring]]
    lengths = [length for ring in sorted(by_ring, key=len, reverse=True) for length in by_ring[ring]]
    check([*rings, (0,)], [*lengths, 5], count, is_uneven)


def test_a_ring_sends_only_what_follows_a_range() -> None:
    length, count = 64, 3
    layout = attention_layout(micro_batch([(0, 1)], [length], 0), 0, [length], 32)
    rows = later_rows(layout, count)
    assert rows.sends == ((tuple(range(16, 19)), 1),)  # the first tokens of its back part, after all of rank 1
    assert rows.receives == ((count, 1),)  # the tokens after its front part; its back part is at the end
    assert rows.rows[15].tolist() == [32, 33, 34]
    assert rows.rows[31].tolist() == [NO_ROW] * count
