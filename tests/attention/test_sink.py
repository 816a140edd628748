"""Attention sinks, joined once to the finished attention, against a softmax with one more column, in float64."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from bytescale_ext.attention.backend import Backend
from bytescale_ext.attention.ring import ring_attention
from tests.attention.cases import GROUPS, MIXED, TINY, Case, assert_matches, kernel_named, run_virtual, whole
from tests.attention.test_slices import run_in_slices

LOCAL = Case(lengths=(9, 1, 30), rounds=(((0, (0,)), (1, (0,)), (2, (0,))),), num_ranks=1, sinks=True)


@pytest.mark.parametrize("case", [MIXED, TINY, GROUPS], ids=["mixed", "tiny", "groups"])
@pytest.mark.parametrize(
    ("name", "dtype", "tolerance"), [("reference", torch.float64, 1e-10), ("cpu_flash", torch.float32, 1e-5)]
)
def test_sinks_over_rings(case: Case, name: str, dtype: torch.dtype, tolerance: float) -> None:
    """With rings of 1 to 4 ranks, packs and padding, the gradients of all ranks sum to the sinks' gradient."""
    case = dataclasses.replace(case, sinks=True)
    results, _ = run_virtual(case, name, dtype)
    assert_matches(case, results, tolerance, dtype)
    total = torch.stack([tensors[4].double() for tensors in results.values()]).sum(0)
    torch.testing.assert_close(total, case.expected_sink(), rtol=tolerance, atol=10 * tolerance)


@pytest.mark.parametrize("num_slices", [0, 1, 3])
def test_autograd_reaches_the_sinks(num_slices: int) -> None:
    """The micro-batch is whole (0) or in slices."""
    case = LOCAL if num_slices == 0 else dataclasses.replace(whole(12, (0,)), sinks=True, num_padding=0)
    sink = case.sink()
    assert sink is not None
    backend = Backend(None, kernel_named("reference"), case.scale, sink.requires_grad_())
    q, k, v, dout = case.inputs(0, 0, torch.float64)
    leaves = [one.requires_grad_() for one in (q, k, v)]
    if num_slices:
        out = run_in_slices(leaves, dout, num_slices, backend)
    else:
        out = ring_attention(q, k, v, case.layout(0, 0), backend)
        out.backward(dout)
    micro_batch, expected = case.micro_batch(0, 0), list(zip(*case.expected(), strict=True))
    for got, column in zip((out.detach(), *(one.grad for one in leaves)), expected, strict=True):
        assert got is not None
        torch.testing.assert_close(got[: sum(case.lengths)], case.rows(micro_batch, column), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(sink.grad, case.expected_sink(), rtol=1e-10, atol=1e-10)
