"""CUDA kernels, alone and in rings of virtual ranks, against the float64 reference. Needs a GPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from bytescale_ext.attention.backend import Backend
from bytescale_ext.attention.kernels.contract import Saved
from bytescale_ext.attention.kernels.reference import reference_backward, reference_forward
from bytescale_ext.attention.kernels.table import Kernel, choose_kernel, generation_of, kernel_table, probe
from bytescale_ext.attention.ring import ring_attention
from bytescale_ext.attention.virtual import mailbox_comms
from tests.attention.cases import GROUPS, MIXED, Case, assert_matches, block_of, kernel_named, run_round, whole

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
NAMES = [row.name for row in kernel_table() if "cuda" in row.devices and row.name != "reference"]
BF16_TOLERANCE = 4e-2


def kernel(name: str, dtype: torch.dtype, head_dim: int) -> Kernel:
    """Return the kernel of this name; skip the test if its package is missing. A failed probe fails the test."""
    row = kernel_named(name)
    device = torch.device("cuda")
    if why_not := row.why_not(device, dtype, head_dim) or row.why_not_on(generation_of(device), (head_dim, head_dim)):
        pytest.skip(f"{name}: {why_not}")
    assert probe(row, device, dtype, head_dim) is None
    return row


def wide(case: Case) -> Case:
    """Return the case with heads of a size that CUDA kernels take."""
    return Case(case.lengths, case.rounds, case.num_ranks, heads=8, kv_heads=2, dim=64, num_padding=5)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", [MIXED, GROUPS, whole(1000, (0, 1, 2, 3, 4))], ids=["mixed", "groups", "five ranks"])
def test_ring_of_virtual_ranks(name: str, dtype: torch.dtype, case: Case) -> None:
    case = wide(case)
    row, comms = kernel(name, dtype, case.dim), mailbox_comms(case.num_ranks)
    ranks = range(case.num_ranks)
    results = {}
    for number in range(len(case.rounds)):
        inputs = [[x.cuda() for x in case.inputs(number, rank, dtype)] for rank in ranks]
        backends = [Backend(comm, row, case.scale) for comm in comms]
        found = run_round([case.layout(number, rank) for rank in ranks], inputs, backends)
        results |= {(number, rank): tuple(x.cpu() for x in found[rank]) for rank in ranks}
    assert_matches(case, results, BF16_TOLERANCE, dtype)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(8, 2, 64), (4, 4, 128), (6, 1, 40)])
def test_blocks(name: str, heads: int, kv_heads: int, dim: int) -> None:
    """Cases are a rectangle of unequal lengths with a sum over other keys, and a pack with a document of one token."""
    row = kernel(name, torch.bfloat16, dim)
    generator = torch.Generator("cuda").manual_seed(0)
    for block in (
        block_of([333], [1001], causal=False, scale=dim**-0.5),
        block_of([1, 199, 317], scale=dim**-0.5),
    ):
        num_q, num_k = block.cu_q.num_tokens, block.cu_k.num_tokens
        rows = ((num_q, heads), (num_k, kv_heads), (num_k, kv_heads))
        q, k, v = (torch.randn(t, h, dim, generator=generator, device="cuda").bfloat16() for t, h in rows)
        dout = torch.randn(q.shape, generator=generator, device="cuda").bfloat16()
        out, lse = row.forward(q, k, v, block)
        assert lse.shape == (heads, num_q)
        assert lse.dtype == torch.float32
        exact = [x.double() for x in (q, k, v)]
        wanted, wanted_lse = reference_forward(*exact, block)
        total, total_lse = wanted * 0.9, wanted_lse + 0.2
        got = row.backward(dout, Saved(q, k, v, total.bfloat16(), total_lse.float()), block)
        grads = reference_backward(dout.double(), Saved(*exact, total, total_lse), block)
        torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-3, atol=1e-3)
        for tensor, expected in zip((out, *got), (wanted, *grads), strict=True):
            assert float((tensor.double() - expected).abs().max() / expected.abs().max()) < BF16_TOLERANCE


@pytest.mark.parametrize("name", NAMES)
def test_windows(name: str) -> None:
    """Rings of virtual ranks have a window of 100 tokens."""
    case = dataclasses.replace(wide(whole(1000, (0, 1, 2))), window=100)
    row, comms, ranks = kernel(name, torch.bfloat16, case.dim), mailbox_comms(case.num_ranks), range(case.num_ranks)
    assert probe(row, torch.device("cuda"), torch.bfloat16, case.dim, windows=True) is None
    inputs = [[x.cuda() for x in case.inputs(0, rank, torch.bfloat16)] for rank in ranks]
    backends = [Backend(comm, row, case.scale) for comm in comms]
    found = run_round([case.layout(0, rank) for rank in ranks], inputs, backends)
    assert_matches(case, {(0, rank): tuple(x.cpu() for x in found[rank]) for rank in ranks}, BF16_TOLERANCE)


@pytest.mark.parametrize("name", NAMES)
def test_no_host_wait(name: str) -> None:
    """A micro-batch of local documents runs without waiting for the device, even at the first use of its offsets."""
    row, case = kernel(name, torch.bfloat16, 64), wide(Case((90, 700), (((0, (0,)), (1, (0,))),), 1))
    q, k, v, dout = (x.cuda().requires_grad_() for x in case.inputs(0, 0, torch.bfloat16))
    layout, backend = case.layout(0, 0), Backend(mailbox_comms(1)[0], row, case.scale)
    ring_attention(q, k, v, layout, backend).backward(dout.detach())
    fresh = case.layout(0, 0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        ring_attention(q, k, v, fresh, backend).backward(dout.detach())
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", NAMES)
def test_no_host_wait_in_rings(name: str) -> None:
    """Documents that travel together are gathered by an index, which is sent to the device without waiting."""
    case = wide(GROUPS)
    row, comms, ranks = kernel(name, torch.bfloat16, case.dim), mailbox_comms(case.num_ranks), range(case.num_ranks)
    inputs = [[x.cuda() for x in case.inputs(0, rank, torch.bfloat16)] for rank in ranks]

    backends = [Backend(comm, row, case.scale) for comm in comms]

    def run() -> None:
        run_round([case.layout(0, rank) for rank in ranks], inputs, backends)

    run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dim", [33, 64, 100, 264])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ring_of_any_head_size(dim: int, dtype: torch.dtype) -> None:
    """Rings run the memory-efficient kernel, in float32 and with heads that flash attention does not support."""
    # A document of one token has the gradient 0, the difference of two sums of ``dim`` products.
    tolerance = BF16_TOLERANCE if dtype is torch.bfloat16 else 1e-5 if dim <= 64 else 5e-5
    case = Case(MIXED.lengths, MIXED.rounds, MIXED.num_ranks, heads=8, kv_heads=2, dim=dim, num_padding=5)
    row, comms, ranks = kernel("torch_efficient", dtype, dim), mailbox_comms(case.num_ranks), range(case.num_ranks)
    for number in range(len(case.rounds)):
        inputs = [[x.cuda() for x in case.inputs(number, rank, dtype)] for rank in ranks]
        backends = [Backend(comm, row, case.scale) for comm in comms]
        found = run_round([case.layout(number, rank) for rank in ranks], inputs, backends)
        results = {(number, rank): tuple(x.cpu() for x in found[rank]) for rank in ranks}
        assert_matches(case, results, tolerance, dtype)


def test_scores_are_not_kept() -> None:
    """A document has 8K tokens in float32; its scores would take 2 GB with 8 heads."""
    row, block = kernel("torch_efficient", torch.float32, 64), block_of([8192], scale=0.125)
    q, k, v = (torch.randn(8192, heads, 64, device="cuda") for heads in (8, 2, 2))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out, lse = row.forward(q, k, v, block)
    row.backward(torch.ones_like(q), Saved(q, k, v, out, lse), block)
    assert torch.cuda.max_memory_allocated() - before < 20 * q.numel() * q.element_size()


@pytest.mark.parametrize(
    ("dtype", "dim"), [(torch.bfloat16, 128), (torch.float16, 128), (torch.float32, 128), (torch.bfloat16, 33)]
)
def test_a_fast_kernel_is_chosen(dtype: torch.dtype, dim: int) -> None:
    choice = choose_kernel("cuda", dtype, dim)
    assert choice.kernel.name in NAMES, choice


def test_all_scores_are_kept_only_by_name() -> None:
    with pytest.raises(ValueError, match="reference: on cuda it must be named"):
        choose_kernel("cuda", torch.float64, 128)
    assert choose_kernel("cuda", torch.float64, 128, "reference").kernel.name == "reference"
