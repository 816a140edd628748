"""Ring attention between processes, through autograd, on the cases of the tests with virtual ranks."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from bytescale_ext.attention.backend import Backend
from bytescale_ext.attention.kernels.table import choose_kernel
from bytescale_ext.attention.ring import ring_attention
from bytescale_ext.parallel.p2p import RingComm
from tests.attention.cases import GROUPS, MIXED, Case, Results, assert_matches
from tests.harness import run_ranks

pytestmark = pytest.mark.ranks

RankResults = tuple[dict[int, tuple[torch.Tensor, ...]], int]


def train_rank(rank: int, world: int, case: Case, dtype: torch.dtype, recompute: bool) -> RankResults:
    """Return ``out, dq, dk, dv`` of each round on one rank, and the bytes sent.

    Each forward pass also runs once without gradients.

    All rounds run forward before they run backward in reverse order, as in a pipeline.
    """
    comm = RingComm(None, rank, world)
    comm.warm_up("cpu")
    kernel = choose_kernel("cpu", dtype, case.dim).kernel
    saved = []
    for number in range(len(case.rounds)):
        q, k, v, dout = case.inputs(number, rank, dtype)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        arguments = (*leaves, case.layout(number, rank), Backend(comm, kernel, case.scale))
        out = checkpoint(ring_attention, *arguments, use_reentrant=False) if recompute else ring_attention(*arguments)
        with torch.no_grad():
            assert torch.equal(ring_attention(*arguments), out)
        saved.append((number, leaves, out, dout))
    comm.stats.reset()
    results = {}
    for number, leaves, out, dout in reversed(saved):
        grads = torch.autograd.grad(out, leaves, dout)
        results[number] = (out.detach(), *grads)
    return results, comm.stats.bytes_sent


def run(case: Case, dtype: torch.dtype, recompute: bool = False) -> tuple[Results, list[int]]:
    ranks = run_ranks(train_rank, case.num_ranks, case, dtype, recompute)
    results = {(number, rank): found[number] for rank, (found, _) in enumerate(ranks) for number in found}
    return results, [sent for _, sent in ranks]


def key_bytes(case: Case, rank: int, value_bytes: int) -> int:
    """Return the bytes of keys and values that a rank sends in one pass over all rounds."""
    total = 0
    for number in range(len(case.rounds)):
        for member in case.layout(number, rank).passes:
            sent = [member.rows[block.source] for block in member.blocks[:-1]]
            total += 2 * sum(sent) * case.kv_heads * case.dim * value_bytes
    return total


def sum_bytes(case: Case, rank: int, value_bytes: int) -> int:
    """Return the bytes of key gradients that a rank sends."""
    total = 0
    for number in range(len(case.rounds)):
        for member in case.layout(number, rank).passes:
            sent = [member.rows[block.source] for block in member.blocks[1:]]
            total += 2 * sum(sent) * case.kv_heads * case.dim * value_bytes
    return total


def test_exact_in_float64() -> None:
    results, sent = run(MIXED, torch.float64)
    assert_matches(MIXED, results, 1e-10)
    assert sent == [key_bytes(MIXED, rank, 8) + sum_bytes(MIXED, rank, 8) for rank in range(4)]


def test_documents_that_travel_together_in_float64() -> None:
    results, sent = run(GROUPS, torch.float64)
    assert_matches(GROUPS, results, 1e-10)
    assert sent == [key_bytes(GROUPS, rank, 8) + sum_bytes(GROUPS, rank, 8) for rank in range(4)]


def test_cpu_flash_in_float32_with_recomputation() -> None:
    results, sent = run(MIXED, torch.float32, recompute=True)
    assert_matches(MIXED, results, 1e-5, torch.float32)
    # The recomputation sends the keys once more.
    assert sent == [2 * key_bytes(MIXED, rank, 4) + sum_bytes(MIXED, rank, 4) for rank in range(4)]


def test_bfloat16_sends_half_the_bytes_of_keys() -> None:
    results, sent = run(MIXED, torch.bfloat16)
    assert_matches(MIXED, results, 4e-2, torch.bfloat16)
    assert sent == [key_bytes(MIXED, rank, 2) + sum_bytes(MIXED, rank, 4) for rank in range(4)]


def lose_a_member(rank: int, world: int) -> str:
    """Rank 1 exits before the second pass; return the error of each other rank."""
    case = MIXED
    comm = RingComm(None, rank, world)
    comm.warm_up("cpu")
    kernel = choose_kernel("cpu", torch.float32, case.dim).kernel
    q, k, v, _ = case.inputs(2, rank, torch.float32)
    layout = case.layout(2, rank)
    ring_attention(q, k, v, layout, Backend(comm, kernel, case.scale))
    dist.barrier()
    if rank == 1:
        os._exit(9)
    try:
        ring_attention(q, k, v, layout, Backend(comm, kernel, case.scale))
    except RuntimeError as error:
        # As at the end of the process: ranks that wait for this rank must get an error too.
        dist.destroy_process_group()
        return str(error)
    return ""


def test_a_lost_member_is_an_error_and_not_a_hang() -> None:
    errors = run_ranks(lose_a_member, 4, may_die={1})
    # The neighbours of rank 1 lose the connection and end, then the ranks that wait for these neighbours end.
    assert errors[1] is None
    assert all(errors[rank] for rank in (0, 2, 3)), errors
