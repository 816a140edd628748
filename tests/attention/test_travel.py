"""What travels round a ring: keys step by step, kept or not, and the sums of their gradients."""

from __future__ import annotations

import pytest
import torch

from bytescale_ext.attention.backend import Steps
from bytescale_ext.attention.layouts.layout import KeptKeys, PrefixKeys, RingPass, ring_pass
from bytescale_ext.attention.layouts.route import Route
from bytescale_ext.attention.layouts.rows import Rows
from bytescale_ext.attention.travel import TravellingKeys, add_kept, key_sums
from bytescale_ext.attention.virtual import MailboxComm, mailbox_comms, run_in_turn

WIDTH, PREFIX, LENGTH = 4, 8, 10  # a slice of 10 tokens after 8 tokens, 2 of them on each member
SHARES = (3, 3, 2, 2)


def values_of(member: int, rows: int, start: int = 0) -> torch.Tensor:
    """Keys ``[rows, 1, 2]`` that name their member and row."""
    row = torch.arange(start, start + rows, dtype=torch.float32)
    return torch.stack((torch.full_like(row, member), row), dim=-1).unsqueeze(1)


def kept_keys() -> KeptKeys:
    """Regions of 5 rows for each member in turn: 2 of the prefix, up to 3 of the slice."""
    starts = range(0, 5 * WIDTH, 5)
    whole = tuple(Rows.of([(start, start + 2 + share)]) for start, share in zip(starts, SHARES, strict=True))
    own = tuple(Rows.of([(start + 2, start + 2 + share)]) for start, share in zip(starts, SHARES, strict=True))
    return KeptKeys(whole, own)


def member_of(index: int, is_kept: bool) -> RingPass:
    kept = kept_keys() if is_kept else None
    keys = kept.whole[index] if kept else Rows.of([(0, 2 + SHARES[index])])
    member = ring_pass([LENGTH], Route(tuple(range(WIDTH)), index), prefix=PrefixKeys((PREFIX,), keys, kept))
    assert member.shares == tuple((share,) for share in SHARES)
    return member


def visit(comm: MailboxComm, is_kept: bool) -> Steps[tuple[list[torch.Tensor], torch.Tensor]]:
    """Return the keys that one rank sees at each step, checked against the member they come from, and its buffer."""
    member = member_of(comm.rank, is_kept)
    buffer = torch.full((5 * WIDTH, 1, 2), torch.nan)
    member.keys.put_(buffer, values_of(comm.rank, 2 + SHARES[comm.rank]))
    if is_kept:  # the prefix of every member arrived with an earlier slice
        for source, rows in enumerate(kept_keys().whole):
            buffer[rows.intervals[0][0] : rows.intervals[0][0] + 2] = values_of(source, 2)
    travelling = TravellingKeys(buffer, -buffer, member, comm.exchange)
    seen = []
    for step in range(WIDTH):
        arriving = travelling.post(step)
        assert (arriving is None) == (step == WIDTH - 1)
        keys, values = travelling.here(step)
        assert torch.equal(values, -keys)
        seen.append(keys.clone())
        if arriving is not None:
            yield arriving
            travelling.arrive(step + 1)
    return seen, buffer


@pytest.mark.parametrize("is_kept", [False, True], ids=["travel", "kept"])
def test_every_rank_sees_the_keys_of_every_member(is_kept: bool) -> None:
    comms = mailbox_comms(WIDTH)
    found = run_in_turn([visit(comm, is_kept) for comm in comms])
    for comm, (seen, buffer) in zip(comms, found, strict=True):
        member = member_of(comm.rank, is_kept)
        for step, keys in enumerate(seen):
            source = member.source(step)
            assert torch.equal(keys, values_of(source, 2 + SHARES[source])), f"{comm.rank=} {step=}"
        if is_kept:
            for source, rows in enumerate(kept_keys().whole):
                assert torch.equal(rows.take(buffer), values_of(source, 2 + SHARES[source]))
        else:
            assert torch.equal(buffer[: 2 + SHARES[comm.rank]], values_of(comm.rank, 2 + SHARES[comm.rank]))
            assert buffer[2 + SHARES[comm.rank] :].isnan().all()


@pytest.mark.parametrize("is_kept", [False, True], ids=["travel", "kept"])
def test_bytes_are_the_rows_that_travel(is_kept: bool) -> None:
    comms = mailbox_comms(WIDTH)
    run_in_turn([visit(comm, is_kept) for comm in comms])
    for comm in comms:
        member = member_of(comm.rank, is_kept)
        rows = sum(SHARES[member.source(step)] + (0 if is_kept else 2) for step in range(WIDTH - 1))
        assert comm.stats.bytes_sent == 2 * rows * 2 * 4
        assert comm.stats.num_exchanges == WIDTH - 1


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_sums_have_the_accumulation_dtype(dtype: torch.dtype, expected: torch.dtype) -> None:
    keys = torch.ones(7, 2, 3, dtype=dtype)
    sums = key_sums(4, keys)
    assert (sums.shape, sums.dtype) == ((2, 4, 2, 3), expected)
    assert not sums.any()
    to_fill = key_sums(0, keys, filled=False)
    assert (to_fill.shape, to_fill.dtype) == ((2, 0, 2, 3), expected)


@pytest.mark.parametrize("is_mine", [True, False])
def test_gradients_of_kept_keys_are_added_and_sent(is_mine: bool) -> None:
    """What travels to the member is the sum of the slice's rows, of this slice and of all later ones."""
    generator = torch.Generator().manual_seed(0)
    whole, own = Rows.of([(2, 5), (7, 9)]), Rows.of([(4, 5), (8, 9)])
    before = [torch.randn(10, 1, 2, generator=generator) for _ in range(2)]
    buffers = (before[0].clone(), before[1].clone())
    part = torch.randn(2, 5, 1, 2, generator=generator)
    travelling = torch.randn(2, 2, 1, 2, generator=generator)
    arrived = travelling.clone()
    add_kept(buffers, part, None if is_mine else travelling, whole, own)
    for index in range(2):
        expected = before[index].clone()
        expected[[2, 3, 4, 7, 8]] += part[index]
        assert torch.equal(buffers[index], expected)
        assert torch.equal(travelling[index], arrived[index] + (0 if is_mine else expected[[4, 8]]))
