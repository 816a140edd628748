"""The memory-efficient kernel with a stand-in for its CUDA operator: groups of documents, padding, heads, sums."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bytescale_ext.attention.kernels import efficient
from bytescale_ext.attention.kernels.contract import Saved
from bytescale_ext.attention.kernels.reference import reference_backward, reference_forward
from bytescale_ext.attention.kernels.table import probe
from bytescale_ext.attention.layouts.blocks import AttentionBlock
from bytescale_ext.attention.layouts.rows import CuSeqlens
from tests.attention.cases import MIXED, Case, assert_matches, block_of, block_tensors, kernel_named, run_virtual
from tests.host_waits import FakeGpu

REAL = torch.ops.aten
MASKS = {0: False, 1: True, 2: True}


def named(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> SimpleNamespace:
    """Return the arguments of a call by name, after binding them to the signature of torch's operator."""
    arguments = getattr(REAL, name).default._schema.arguments
    names = [one.name for one in arguments if not one.kwarg_only]
    assert len(args) <= len(names)
    values = dict(zip(names, args, strict=False)) | kwargs
    assert values.keys() <= {one.name for one in arguments}
    assert all(one.name in values or one.has_default_value() for one in arguments)
    return SimpleNamespace(**values)


class OperatorsOnCpu:
    """CPU version of torch's memory-efficient operators as their CUDA source defines them, document by document."""

    def __init__(self) -> None:
        self.lse_rows = 0  # calls so far

    def _efficient_attention_forward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        call = named("_efficient_attention_forward", args, kwargs)
        self.check(call)
        assert call.compute_log_sumexp
        rows = -(-call.max_seqlen_q // 32) * 32
        lse = torch.full((len(call.cu_seqlens_q) - 1, call.query.shape[2], rows), torch.inf, dtype=torch.float64)
        self.lse_rows += lse[:, 0].numel()
        out = torch.empty_like(call.query)
        for number, (rows_q, rows_k) in enumerate(self.documents(call)):
            block = self.block(call, len(rows_q), len(rows_k))
            q, k, v = call.query[0, rows_q], call.key[0, rows_k], call.value[0, rows_k]
            out[0, rows_q], lse[number, :, : len(rows_q)] = reference_forward(q, k, v, block)
        seed = torch.zeros((), dtype=torch.int64)
        return out, lse.to(efficient.empty_output(q)[1].dtype), seed, seed

    def _efficient_attention_backward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        call = named("_efficient_attention_backward", args, kwargs)
        self.check(call)
        assert call.logsumexp.shape[2] % 32 == 0
        assert call.logsumexp.is_contiguous()
        assert call.grad_out_.shape == call.out.shape == call.query.shape
        grads = [torch.empty_like(x) for x in (call.query, call.key, call.value)]
        for number, (rows_q, rows_k) in enumerate(self.documents(call)):
            block = self.block(call, len(rows_q), len(rows_k))
            lse = call.logsumexp[number, :, : len(rows_q)]
            assert torch.isposinf(call.logsumexp[number, :, len(rows_q) :]).all()
            tensors = (call.query[0, rows_q], call.key[0, rows_k], call.value[0, rows_k], call.out[0, rows_q], lse)
            parts = reference_backward(call.grad_out_[0, rows_q], Saved(*tensors), block)
            for grad, rows, part in zip(grads, (rows_q, rows_k, rows_k), parts, strict=True):
                grad[0, rows] = part
        return *grads, torch.empty(0)

    @staticmethod
    def block(call: SimpleNamespace, num_queries: int, num_keys: int) -> AttentionBlock:
        """Return the block of one document. The window includes the query's own key."""
        assert (call.window_size is None) == (call.custom_mask_type != 2)
        window = None if call.window_size is None else call.window_size - 1
        return block_of([num_queries], [num_keys], MASKS[call.custom_mask_type], call.scale, window)

    @staticmethod
    def check(call: SimpleNamespace) -> None:
        """Check the operator's requirements on its inputs."""
        assert call.bias is None
        assert call.dropout_p == 0.0
        assert call.query.shape[2:] == call.key.shape[2:] == call.value.shape[2:]
        for tensor in (call.query, call.key, call.value):
            assert tensor.shape[0] == 1
            assert tensor.stride(-1) == 1
            assert all(step % 8 == 0 for step in tensor.stride()[:-1])
        for cu, longest in ((call.cu_seqlens_q, call.max_seqlen_q), (call.cu_seqlens_k, call.max_seqlen_k)):
            assert cu.dtype == torch.int32
            assert longest == cu.diff().max()
            assert cu.diff().min() > 0  # a document without keys would divide by 0

    @staticmethod
    def documents(call: SimpleNamespace) -> list[tuple[range, range]]:
        """Return the query and key rows of each document."""
        bounds = zip(pairwise(call.cu_seqlens_q.tolist()), pairwise(call.cu_seqlens_k.tolist()), strict=True)
        return [(range(*rows_q), range(*rows_k)) for rows_q, rows_k in bounds]


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch) -> OperatorsOnCpu:
    made = OperatorsOnCpu()
    monkeypatch.setattr(efficient, "aten", made)
    return made


def assert_agrees(block: AttentionBlock, dtype: torch.dtype = torch.float64, dim: int = 16, kv_heads: int = 2) -> None:
    """Compare with the reference, with an output and a sum that cover other keys too."""
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    q, k, v, dout = block_tensors(block, dtype, 4, kv_heads, dim)
    exact = [x.double() for x in (q, k, v)]
    wanted, wanted_lse = reference_forward(*exact, block)
    out, lse = efficient.efficient_forward(q, k, v, block)
    total, total_lse = wanted * 0.7 + 0.1, wanted_lse + 0.4
    saved = Saved(q, k, v, total.to(dtype), total_lse.to(lse.dtype))
    got = (out, lse, *efficient.efficient_backward(dout, saved, block))
    grads = reference_backward(dout.double(), Saved(*exact, total, total_lse), block)
    for tensor, expected in zip(got, (wanted, wanted_lse, *grads), strict=True):
        assert tensor.shape == expected.shape
        scale = max(1.0, float(expected.abs().nan_to_num(posinf=0).max())) if expected.numel() else 1.0
        torch.testing.assert_close(tensor.double(), expected, rtol=tolerance, atol=tolerance * scale)
    assert [tensor.dtype for tensor in got] == [dtype, lse.dtype, dtype, dtype, dtype]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "block",
    [
        block_of([9]),
        block_of([33]),
        block_of([1, 200, 3, 2, 150, 1]),
        block_of([0, 4, 0, 0, 1, 0]),
        block_of([0, 0]),
        block_of([]),
        block_of([70], [5], causal=False),
        block_of([3, 0, 2], [40, 6, 1], causal=False),
        block_of([3, 2, 4], [0, 6, 0], causal=False),
        block_of([50, 1, 9], window=6),
        block_of([50, 1, 9], [70, 4, 9], window=40),
    ],
    ids=[
        "one", "over 32", "documents", "empty", "all empty", "none", "rectangle", "no queries", "no keys", "window",
        "keys before",
    ],
)  # fmt: skip
def test_agrees_with_the_reference(operators: OperatorsOnCpu, block: AttentionBlock, dtype: torch.dtype) -> None:
    assert_agrees(block, dtype)


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)), max_size=6), st.booleans())
def test_any_documents(lengths: list[tuple[int, int]], causal: bool) -> None:
    lengths_q = [one for one, _ in lengths]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(efficient, "aten", OperatorsOnCpu())
        assert_agrees(block_of(lengths_q, lengths_q if causal else [other for _, other in lengths], causal))


@pytest.mark.slow
@pytest.mark.parametrize("dim", [8, 12])
def test_rings(operators: OperatorsOnCpu, monkeypatch: pytest.MonkeyPatch, dim: int) -> None:
    """Blocks of a ring are joined by their sums, and their gradients add up."""
    case = Case(MIXED.lengths, MIXED.rounds, MIXED.num_ranks, dim=dim)
    results, _ = run_virtual(case, "torch_efficient", torch.float64)
    assert_matches(case, results, 1e-10)


def test_probe_accepts_it(operators: OperatorsOnCpu) -> None:
    for dtype, dim in ((torch.float32, 64), (torch.float32, 33), (torch.bfloat16, 264)):
        assert probe(kernel_named("torch_efficient"), torch.device("cpu"), dtype, dim) is None


@given(st.lists(st.integers(0, 5000), max_size=40))
def test_groups_hold_each_document_once_and_waste_little(lengths: list[int]) -> None:
    groups = efficient.similar_documents(CuSeqlens.of_lengths(lengths), CuSeqlens.of_lengths(lengths))
    found = sorted(length for group in groups for length in group.cu_q.lengths)
    assert found == sorted(length for length in lengths if length)
    for group in groups:
        assert group.cu_q.longest < 2 * min(group.cu_q.lengths)
    assert len(groups) <= 13


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_operator_takes_these_shapes_without_a_wait(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """Run torch's own operator on a fake device with grouped documents. Torch cannot fake its backward pass."""

    def backward(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        call = named("_efficient_attention_backward", args, kwargs)
        assert call.logsumexp.is_cuda
        return tuple(torch.empty_like(x) for x in (call.query, call.key, call.value, call.value))

    fakes = SimpleNamespace(
        _efficient_attention_forward=REAL._efficient_attention_forward, _efficient_attention_backward=backward
    )
    monkeypatch.setattr(efficient, "aten", fakes)
    block = block_of([1, 2, 40, 1, 55])
    with FakeGpu() as gpu:
        q, k, v = (torch.empty(99, heads, 20, dtype=dtype, device="cuda") for heads in (4, 2, 2))
        out, lse = efficient.efficient_forward(q, k, v, block)
        grads = efficient.efficient_backward(q, Saved(q, k, v, out, lse), block)
    efficient.similar_documents.cache_clear()  # the cache contains fake tensors
    assert gpu.waits == []
    assert [x.shape for x in (out, *grads)] == [x.shape for x in (q, q, k, v)]
    assert (lse.shape, lse.dtype, lse.device.type) == ((4, 99), torch.float32, "cuda")
