"""Ring attention of virtual ranks in one process, and of one rank, against dense attention of each sequence."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from bytescale_ext.attention.backend import Backend
from bytescale_ext.attention.ring import ring_attention
from bytescale_ext.attention.virtual import mailbox_comms
from tests.attention.cases import (
    GROUPS,
    MIXED,
    TINY,
    Case,
    assert_matches,
    assert_plan_is_exact,
    kernel_named,
    run_virtual,
    whole,
)
from tests.plan.simple_plans import plan_naive

UNEVEN = dataclasses.replace(MIXED, uneven=True)
UNEVEN_GROUPS = dataclasses.replace(GROUPS, uneven=True)
UNEVEN_INNER = Case((60, 41), (tuple((seq, tuple(range(8))) for seq in (0, 1)),), 8, inner_width=4, uneven=True)
LOCAL = Case(lengths=(9, 1, 30, 4), rounds=(((0, (0,)), (1, (0,)), (2, (0,)), (3, (0,))),), num_ranks=1)


@pytest.mark.parametrize("case", [MIXED, TINY, GROUPS, LOCAL, UNEVEN, UNEVEN_GROUPS, UNEVEN_INNER])
@pytest.mark.parametrize("heads", [(8, 2), (3, 3)], ids=["gqa", "mha"])
def test_exact_in_float64(case: Case, heads: tuple[int, int]) -> None:
    case = dataclasses.replace(case, heads=heads[0], kv_heads=heads[1])
    results, _ = run_virtual(case, "reference", torch.float64)
    assert_matches(case, results, 1e-10)


@pytest.mark.slow
@given(st.integers(1, 9), st.integers(1, 70))
@settings(max_examples=40, deadline=None)
def test_any_width_and_length(width: int, length: int) -> None:
    case = whole(max(width, length), tuple(range(width)), heads=2, kv_heads=1, dim=4)
    results, _ = run_virtual(case, "reference", torch.float64)
    assert_matches(case, results, 1e-10)


@given(st.data())
@settings(max_examples=30, deadline=None)
@pytest.mark.slow
def test_any_rings_in_one_micro_batch(data: st.DataObject) -> None:
    num_ranks = data.draw(st.integers(1, 5))
    placed, lengths = [], []
    for seq in range(data.draw(st.integers(1, 6))):
        first = data.draw(st.integers(0, num_ranks - 1))
        ring = tuple(range(first, data.draw(st.integers(first + 1, num_ranks))))
        placed.append((seq, ring))
        lengths.append(data.draw(st.integers(len(ring), 25)))
    case = Case(tuple(lengths), (tuple(placed),), num_ranks, heads=2, kv_heads=1, dim=4)
    results, _ = run_virtual(case, "reference", torch.float64)
    assert_matches(case, results, 1e-10)


@pytest.mark.parametrize("case", [MIXED, TINY, GROUPS, LOCAL])
def test_cpu_flash_in_float32(case: Case) -> None:
    results, _ = run_virtual(case, "cpu_flash", torch.float32)
    assert_matches(case, results, 1e-5, torch.float32)


@pytest.mark.slow
def test_rings_lose_no_precision_against_one_kernel() -> None:
    """Sums over blocks are float32, so many blocks have nearly the same error as a single block."""
    ring = whole(256, tuple(range(8)))
    one = Case((256,), (((0, (0,)),),), 1)
    wanted = one.expected(torch.bfloat16)[0]

    def largest_error(case: Case, column: int) -> float:
        results, _ = run_virtual(case, "cpu_flash", torch.bfloat16)
        answers = [
            (torch.cat([wanted[column][a:b] for a, b in shard.ranges]), results[0, rank][column])
            for rank in range(case.num_ranks)
            for shard in case.micro_batch(0, rank).shards
        ]
        return max(float((got[: len(answer)].double() - answer).abs().max()) for answer, got in answers)

    for column in range(4):
        assert largest_error(ring, column) <= 2.5 * largest_error(one, column)


def test_bytes_are_those_of_the_plan() -> None:
    case = whole(23, (0, 1, 2), heads=4, kv_heads=2, dim=8)
    _, comms = run_virtual(case, "cpu_flash", torch.float32)
    layout = case.layout(0, 1)
    row_bytes = 2 * case.kv_heads * case.dim * 4
    rows = layout.passes[0].rows
    assert rows == (8, 8, 7)
    for rank, comm in enumerate(comms):
        before = {0: 1, 2: 0, 1: 2}[rank]  # keys travel 0, 2, 1
        keys = rows[rank] + rows[before]
        sums = 23 - rows[rank]
        assert comm.stats.bytes_sent == (2 * keys + sums) * row_bytes
        assert comm.stats.num_exchanges == 6


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(1, 5))
@settings(max_examples=20, deadline=None)
@pytest.mark.slow
def test_planned_steps_run_to_their_end(lengths: list[int], num_ranks: int) -> None:
    """Ranks run their micro-batches independently and may have different numbers of them."""
    assert_plan_is_exact(plan_naive(lengths, num_ranks, -(-max(lengths) // num_ranks) + 3))


def attend(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, name: str = "cpu_flash") -> torch.Tensor:
    """Run the single rank of a case without rings, through autograd."""
    (comm,) = mailbox_comms(1)
    return ring_attention(q, k, v, case.layout(0, 0), Backend(comm, kernel_named(name), case.scale))


def test_recomputation_gives_the_same_bits() -> None:
    q, k, v, dout = LOCAL.inputs(0, 0, torch.float32)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    direct = torch.autograd.grad(attend(LOCAL, *leaves), leaves, dout)
    again = torch.autograd.grad(checkpoint(attend, LOCAL, *leaves, use_reentrant=False), leaves, dout)
    assert all(torch.equal(a, b) for a, b in zip(direct, again, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cpu_flash", "reference"])
def test_documents_do_not_see_each_other(name: str) -> None:
    """Changing one sequence changes no bit of any other sequence."""
    numbers = [0, 1, 2, 3, 4, 5, 6]
    case = Case(
        lengths=(21, 14, 6, 5, 9, 11, 7),
        rounds=(((0, (0, 1)), (1, (0, 1, 2)), (2, (0,)), (3, (0,)), (4, (2,)), (5, (0, 1)), (6, (0, 1, 2))),),
        num_ranks=3,
    )
    before, _ = run_virtual(case, name, torch.float32)
    for changed in numbers:
        other = _Perturbed(**{**case.__dict__, "changed": changed})
        after, _ = run_virtual(other, name, torch.float32)
        for key, tensors in after.items():
            start = 0
            for shard in case.micro_batch(*key).shards:
                rows = slice(start, start + shard.num_tokens)
                same = [torch.equal(a[rows], b[rows]) for a, b in zip(before[key], tensors, strict=True)]
                assert all(same) if shard.seq != changed else not any(same), f"{changed=} {shard=}"
                start = rows.stop


@dataclasses.dataclass(frozen=True)
class _Perturbed(Case):
    """Case with different values for one sequence."""

    changed: int = -1

    def values(self, seq: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        values = super().values(seq, dtype)
        return tuple(x * 1.5 + 0.25 for x in values) if seq == self.changed else values


def test_a_ring_needs_a_comm() -> None:
    case = whole(8, (0, 1))
    q, k, v, _ = case.inputs(0, 0, torch.float32)
    with pytest.raises(AssertionError, match="a layout with rings needs a comm"):
        ring_attention(q, k, v, case.layout(0, 0), Backend(None, kernel_named("cpu_flash"), case.scale))


def test_strided_inputs_give_the_same_bits() -> None:
    """Megatron's query, key and value are slices of one tensor."""
    q, k, v, dout = LOCAL.inputs(0, 0, torch.float32)
    direct = [x.clone().requires_grad_() for x in (q, k, v)]
    mixed = torch.cat((q, k, v), dim=1).requires_grad_()
    expected, got = attend(LOCAL, *direct), attend(LOCAL, *mixed.split((4, 2, 2), dim=1))
    assert torch.equal(got, expected)
    grads = torch.autograd.grad(expected, direct, dout)
    (of_mixed,) = torch.autograd.grad(got, mixed, dout)
    assert torch.equal(of_mixed, torch.cat(grads, dim=1))


@pytest.mark.slow
def test_gradients_match_finite_differences() -> None:
    case = Case((3, 1, 4), (((0, (0,)), (1, (0,)), (2, (0,))),), 1, heads=2, kv_heads=1, dim=4, num_padding=1)
    q, k, v, _ = (x.requires_grad_() for x in case.inputs(0, 0, torch.float64))
    assert torch.autograd.gradcheck(lambda *qkv: attend(case, *qkv, name="reference"), (q, k, v))


def test_tensors_that_do_not_fit_are_refused() -> None:
    q, k, v, _ = LOCAL.inputs(0, 0, torch.float32)
    with pytest.raises(ValueError, match="over 47 rows"):
        attend(LOCAL, q[1:], k[1:], v[1:])
    with pytest.raises(ValueError, match="over 47 rows"):
        attend(LOCAL, q, k, v[:, :1])
    with pytest.raises(ValueError, match="multiple of kv_heads"):
        attend(LOCAL, q[:, :3], k, v)
    with pytest.raises(ValueError, match="one dtype"):
        attend(LOCAL, q, k.double(), v.double())
