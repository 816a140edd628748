"""Transfers in a ring: keys and sums of their gradients, documents together; and the order of passes of ranks."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from bytescale_ext.attention.backend import Backend, Exchanges
from bytescale_ext.attention.kernels.table import KernelCalls, counting
from bytescale_ext.attention.layouts.layout import KeptKeys, PrefixKeys, RingPass, attention_layout, ring_pass
from bytescale_ext.attention.layouts.route import Route
from bytescale_ext.attention.layouts.rows import Rows
from bytescale_ext.attention.travel import TravellingKeys, add_kept
from bytescale_ext.attention.virtual import MailboxComm, mailbox_comms, run_in_turn
from bytescale_ext.errors import PlanError
from bytescale_ext.parallel.p2p import ExchangeStats
from bytescale_ext.plan.step.check import check_step_plan
from bytescale_ext.plan.step.micro_batch import MicroBatch, Shard, zigzag_ranges
from bytescale_ext.plan.step.plan import StepPlan
from tests.attention.cases import Case, assert_matches, assert_plan_is_exact, kernel_named, run_round, run_virtual

WIDTH, PREFIX, LENGTH = 4, 8, 10  # a slice of 10 tokens after 8 tokens, 2 of them on each member
SHARES = (3, 3, 2, 2)


def values_of(member: int, rows: int, start: int = 0) -> torch.Tensor:
    """Return keys ``[rows, 1, 2]`` that contain their member and row."""
    row = torch.arange(start, start + rows, dtype=torch.float32)
    return torch.stack((torch.full_like(row, member), row), dim=-1).unsqueeze(1)


def kept_keys() -> KeptKeys:
    """Return regions of 5 rows for each member in turn: 2 of the prefix, up to 3 of the slice."""
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


def visit(comm: MailboxComm, is_kept: bool) -> Exchanges[tuple[list[torch.Tensor], torch.Tensor]]:
    """Return the keys that a rank receives at each step, checked against their member, and its buffer."""
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


@pytest.mark.parametrize("is_mine", [True, False])
def test_gradients_of_kept_keys_are_added_and_sent(is_mine: bool) -> None:
    """The member receives the sum of the slice's rows, from this slice and all later slices."""
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


Ring = tuple[int, ...]


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("heads", [(6, 2), (3, 3)], ids=["gqa", "mha"])
def test_odd_documents_of_one_ring_are_exact(width: int, heads: tuple[int, int]) -> None:
    lengths = (23, width, 41, 2 * width + 1, 7, 19)
    ring = tuple(range(width))
    case = Case(lengths, (tuple((seq, ring) for seq in range(6)),), width, heads=heads[0], kv_heads=heads[1], dim=4)
    assert all(len(case.layout(0, rank).passes) == 1 for rank in ring)
    results, _ = run_virtual(case, "reference", torch.float64)
    assert_matches(case, results, 1e-10)


def costs(case: Case) -> list[tuple[KernelCalls, ExchangeStats]]:
    """Return kernel calls and messages of each virtual rank in the forward and backward pass of round 0."""
    ranks, comms = range(case.num_ranks), mailbox_comms(case.num_ranks)
    kernels = [counting(kernel_named("cpu_flash")) for _ in ranks]
    inputs = [case.inputs(0, rank, torch.float32) for rank in ranks]
    backends = [Backend(comm, kernel, case.scale) for comm, (kernel, _) in zip(comms, kernels, strict=True)]
    run_round([case.layout(0, rank) for rank in ranks], inputs, backends)
    return [(calls, comm.stats) for (_, calls), comm in zip(kernels, comms, strict=True)]


@pytest.mark.parametrize("num_documents", [1, 2, 9])
@pytest.mark.parametrize("width", [2, 3, 4])
def test_a_pass_costs_the_same_for_any_number_of_documents(num_documents: int, width: int) -> None:
    ring = tuple(range(width))
    lengths = tuple(3 * width + seq for seq in range(num_documents))
    case = Case(lengths, (tuple((seq, ring) for seq in range(num_documents)),), width)
    for calls, stats in costs(case):
        assert calls == KernelCalls(num_forward=width, num_backward=width)
        # Keys travel twice, the sums of their gradients once.
        assert stats.num_exchanges == 3 * (width - 1)


def test_other_rings_in_between_do_not_separate_documents() -> None:
    """Rank 0 has the ring (0, 1) between two documents of (0, 1, 2), rank 2 does not. Both run them in one pass."""
    case = Case((9, 8, 7, 6), (((0, (0, 1, 2)), (1, (0, 1)), (2, (0, 1, 2)), (3, (0, 1))),), 3)
    passes = [[(member.ring, member.seqs) for member in case.layout(0, rank).passes] for rank in range(3)]
    assert passes[0] == passes[1] == [((0, 1, 2), (0, 2)), ((0, 1), (1, 3))]
    assert passes[2] == [((0, 1, 2), (0, 2))]
    assert case.layout(0, 0).passes[0].in_micro_batch.intervals == ((0, 3), (7, 10))


def passes_of(plan: StepPlan, rank: int) -> list[tuple[Ring, tuple[int, ...]]]:
    """Return ``(ring, seqs)`` of every pass of a rank in a step, in execution order."""
    layouts = [attention_layout(held, rank, plan.lengths, held.num_tokens) for held in plan.ranks[rank]]
    return [(member.ring, member.seqs) for layout in layouts for member in layout.passes]


def assert_ranks_agree(plan: StepPlan) -> None:
    """Check that every two ranks run their common passes in the same order with the same sequences."""
    passes = [passes_of(plan, rank) for rank in range(plan.num_ranks)]
    for one in range(plan.num_ranks):
        for other in range(one):
            of_one = [held for held in passes[one] if other in held[0]]
            of_other = [held for held in passes[other] if one in held[0]]
            assert of_one == of_other, f"{one=} {other=} {plan=}"


def plan_of(lengths: Sequence[int], rings: Sequence[Ring], rows: Sequence[Sequence[Sequence[int]]]) -> StepPlan:
    """Return a plan from the sequences of each micro-batch of each rank."""

    def shard(seq: int, rank: int) -> Shard:
        ring = rings[seq]
        return Shard(seq, zigzag_ranges(lengths[seq], len(ring), ring.index(rank)), ring)

    def micro_batch(seqs: Sequence[int], rank: int) -> MicroBatch:
        return MicroBatch(tuple(shard(seq, rank) for seq in sorted(seqs, key=lambda seq: (len(rings[seq]) == 1, seq))))

    ranks = tuple(tuple(micro_batch(seqs, rank) for seqs in row) for rank, row in enumerate(rows))
    return StepPlan(len(rows), sum(lengths), tuple(lengths), ranks)


def any_plan(source: random.Random) -> StepPlan:
    """Return a plan of rings over a few ranks, which usually divide their sequences into the same micro-batches."""
    num_ranks, num_seqs, num_slots = source.randint(2, 4), source.randint(2, 6), source.randint(1, 3)
    rings = []
    for _ in range(num_seqs):
        first = source.randrange(num_ranks)
        rings.append(tuple(range(first, source.randint(first, num_ranks - 1) + 1)))
    lengths = [source.randint(len(ring), 12) for ring in rings]
    common = [source.randrange(num_slots) for _ in rings]
    rows = []
    for rank in range(num_ranks):
        slots: dict[int, list[int]] = {}
        for seq, ring in enumerate(rings):
            if rank in ring:
                differs = source.random() < 0.1 or len(ring) == 1
                slots.setdefault(source.randrange(num_slots) if differs else common[seq], []).append(seq)
        order = sorted(slots)
        if source.random() < 0.1:
            source.shuffle(order)
        rows.append([slots[slot] for slot in order])
    return plan_of(lengths, rings, rows)


@pytest.mark.full
@pytest.mark.slow
def test_ranks_agree_on_passes_of_every_accepted_plan() -> None:
    """The check of coupled groups ensures that all members have the same documents in a pass."""
    source = random.Random(5)
    accepted = refused = shared = exact = 0
    for _ in range(400):
        plan = any_plan(source)
        try:
            check_step_plan(plan)
        except PlanError:
            refused += 1
            continue
        accepted += 1
        assert_ranks_agree(plan)
        several = any(len(seqs) > 1 for rank in range(plan.num_ranks) for _, seqs in passes_of(plan, rank))
        shared += several
        if several and exact < 40:
            exact += 1
            assert_plan_is_exact(plan)
    assert exact == 40
    assert min(accepted / 100, refused / 20, shared / 50) > 1, f"{accepted=} {refused=} {shared=}"


def test_documents_together_on_one_rank_and_apart_on_another_are_refused() -> None:
    """Rank 0 has two documents of a ring together and rank 1 separately, so no order of passes works."""
    plan = plan_of((8, 9), ((0, 1), (0, 1)), (((0, 1),), ((0,), (1,))))
    assert passes_of(plan, 0) != passes_of(plan, 1)
    with pytest.raises(PlanError, match="must run at the same time: rings couple them"):
        check_step_plan(plan)
