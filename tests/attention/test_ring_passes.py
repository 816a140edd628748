"""Documents that travel together: what a pass costs, and the order of passes on every pair of ranks."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bytescale_ext.attention.kernels import KernelCalls, counting
from bytescale_ext.attention.layout import attention_layout
from bytescale_ext.attention.ring import RingContext, backward_steps, forward_steps
from bytescale_ext.attention.rows import Rows
from bytescale_ext.attention.virtual import mailbox_comms, run_in_turn
from bytescale_ext.errors import PlanError
from bytescale_ext.parallel.p2p import ExchangeStats
from bytescale_ext.plan.check import check_step_plan
from bytescale_ext.plan.hdp import plan_static_cp
from bytescale_ext.plan.shapes import MicroBatch, Shard, StepPlan, zigzag_ranges
from tests.attention.cases import Case, assert_matches, assert_plan_is_exact, kernel_named, run_virtual

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
    """What each virtual rank calls and sends in the forward and backward pass of round 0."""
    ranks, comms = range(case.num_ranks), mailbox_comms(case.num_ranks)
    kernels = [counting(kernel_named("cpu_flash")) for _ in ranks]
    inputs = [case.inputs(0, rank, torch.float32) for rank in ranks]
    rings = [RingContext(case.layout(0, rank), comms[rank], kernels[rank][0], case.scale) for rank in ranks]
    outputs = run_in_turn([forward_steps(*inputs[rank][:3], rings[rank]) for rank in ranks])
    run_in_turn([backward_steps(inputs[rank][3], *inputs[rank][:3], *outputs[rank], rings[rank]) for rank in ranks])
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


def test_documents_of_one_ring_send_the_bytes_of_each() -> None:
    ring, lengths = (0, 1, 2), (23, 8, 3)
    together = costs(Case(lengths, (tuple((seq, ring) for seq in range(3)),), 3))
    alone = [costs(Case((length,), (((0, ring),),), 3)) for length in lengths]
    for rank in ring:
        assert together[rank][1].bytes_sent == sum(one[rank][1].bytes_sent for one in alone)


def test_other_rings_between_do_not_part_documents() -> None:
    """Rank 0 sees the ring (0, 1) between two documents of (0, 1, 2), rank 2 does not; both make one pass of them."""
    case = Case((9, 8, 7, 6), (((0, (0, 1, 2)), (1, (0, 1)), (2, (0, 1, 2)), (3, (0, 1))),), 3)
    passes = [[(member.ring, member.seqs) for member in case.layout(0, rank).passes] for rank in range(3)]
    assert passes[0] == passes[1] == [((0, 1, 2), (0, 2)), ((0, 1), (1, 3))]
    assert passes[2] == [((0, 1, 2), (0, 2))]
    assert case.layout(0, 0).passes[0].in_micro_batch.intervals == ((0, 3), (7, 10))


def passes_of(plan: StepPlan, rank: int) -> list[tuple[Ring, tuple[int, ...]]]:
    """``(ring, seqs)`` of every pass of a rank in its whole step, in running order."""
    layouts = [attention_layout(held, rank, plan.lengths, held.num_tokens) for held in plan.ranks[rank]]
    return [(member.ring, member.seqs) for layout in layouts for member in layout.passes]


def assert_ranks_agree(plan: StepPlan) -> None:
    """Every two ranks meet the passes that both are in with the same sequences and in the same order."""
    passes = [passes_of(plan, rank) for rank in range(plan.num_ranks)]
    for one in range(plan.num_ranks):
        for other in range(one):
            of_one = [held for held in passes[one] if other in held[0]]
            of_other = [held for held in passes[other] if one in held[0]]
            assert of_one == of_other, f"{one=} {other=} {plan=}"


def plan_of(lengths: Sequence[int], rings: Sequence[Ring], rows: Sequence[Sequence[Sequence[int]]]) -> StepPlan:
    """A plan from the sequences of each micro-batch of each rank."""

    def shard(seq: int, rank: int) -> Shard:
        ring = rings[seq]
        return Shard(seq, zigzag_ranges(lengths[seq], len(ring), ring.index(rank)), ring)

    def micro_batch(seqs: Sequence[int], rank: int) -> MicroBatch:
        return MicroBatch(tuple(shard(seq, rank) for seq in sorted(seqs, key=lambda seq: (len(rings[seq]) == 1, seq))))

    ranks = tuple(tuple(micro_batch(seqs, rank) for seqs in row) for rank, row in enumerate(rows))
    return StepPlan(len(rows), sum(lengths), tuple(lengths), ranks)


def any_plan(source: random.Random) -> StepPlan:
    """Rings over a few ranks; each rank divides what it holds into micro-batches, most often as the others do."""
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
                own_will = source.random() < 0.1 or len(ring) == 1
                slots.setdefault(source.randrange(num_slots) if own_will else common[seq], []).append(seq)
        order = sorted(slots)
        if source.random() < 0.1:
            source.shuffle(order)
        rows.append([slots[slot] for slot in order])
    return plan_of(lengths, rings, rows)


def test_ranks_agree_on_passes_of_every_plan_that_is_accepted() -> None:
    """The checker's law of classes is what makes groups of one ring the same on all members."""
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
    assert accepted > 100 and refused > 20 and shared > 50 and exact == 40, f"{accepted=} {refused=} {shared=}"


def test_one_ring_in_micro_batches_of_other_composition_is_refused() -> None:
    """Rank 0 holds two documents of a ring together and rank 1 apart: no order of passes could be right."""
    plan = plan_of((8, 9), ((0, 1), (0, 1)), (((0, 1),), ((0,), (1,))))
    assert passes_of(plan, 0) != passes_of(plan, 1)
    with pytest.raises(PlanError, match="must run at the same time: rings tie them"):
        check_step_plan(plan)


@given(st.lists(st.integers(1, 9) | st.integers(1, 40), min_size=1, max_size=14), st.sampled_from([2, 4]))
@settings(max_examples=25, deadline=None)
def test_static_plans_with_tiny_documents(lengths: list[int], width: int) -> None:
    plan = plan_static_cp(lengths, 4, max(-(-max(lengths) // width), 8), width)
    check_step_plan(plan, lengths)
    assert_ranks_agree(plan)
    for rank, row in enumerate(plan.ranks):
        for held in row:
            rings = [member.ring for member in attention_layout(held, rank, lengths, held.num_tokens).passes]
            assert len(set(rings)) == len(rings) <= width - 1
    assert_plan_is_exact(plan)


def test_a_static_pack_of_documents_is_one_pass() -> None:
    plan = plan_static_cp((40, 12, 9, 30, 21), 4, 32, 4)
    assert [passes_of(plan, rank) for rank in range(4)] == [[((0, 1, 2, 3), (0, 1, 2, 3, 4))]] * 4


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), max_size=6))
def test_rows_are_taken_put_and_added(gaps_and_sizes: list[tuple[int, int]]) -> None:
    intervals, stop = [], 0
    for gap, size in gaps_and_sizes:
        intervals.append((stop + gap, stop + gap + size))
        stop += gap + size
    rows = Rows.of(intervals)
    listed = [row for a, b in intervals for row in range(a, b)]
    assert rows.num_rows == len(listed) and rows.is_view == (not listed or listed[-1] - listed[0] == len(listed) - 1)
    tensor = torch.arange(2.0 * (stop + 2)).view(2, -1)
    taken = rows.take(tensor, dim=1)
    assert torch.equal(taken, tensor[:, listed])
    assert (taken.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()) == rows.is_view
    expected = tensor.clone()
    expected[:, listed] *= 2
    values = taken.double().clone()
    rows.add_(tensor, values, dim=1)
    assert torch.equal(tensor, expected)
    rows.put_(tensor, values, dim=1)
    expected[:, listed] /= 2
    assert torch.equal(tensor, expected)


def test_rows_are_values() -> None:
    first, second = Rows.of([(0, 2), (2, 2), (2, 3), (5, 7)]), Rows(((0, 3), (5, 7)))
    first.take(torch.zeros(8))
    assert first == second and hash(first) == hash(second)
    with pytest.raises(AssertionError):
        Rows.of([(3, 5), (0, 1)])
