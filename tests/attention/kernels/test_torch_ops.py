"""Kernels made of torch's operators against the reference: documents, heads, dtypes and memory formats."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bytescale_ext.attention.kernels.contract import Saved
from bytescale_ext.attention.kernels.reference import reference_backward, reference_forward
from bytescale_ext.attention.kernels.torch_ops import cpu_flash_backward, cpu_flash_forward, missing_operator
from bytescale_ext.attention.layouts.blocks import AttentionBlock
from tests.attention.cases import block_of, block_tensors, kernel_named
from tests.sample import examples

ON_CPU = ["cpu_flash", "reference"]


def assert_agrees(
    block: AttentionBlock, dtype: torch.dtype, tolerance: float, heads: int = 4, kv_heads: int = 2
) -> None:
    """CPU flash attention equals the reference in float64, with an output and a sum that cover other keys too."""
    q, k, v, dout = block_tensors(block, dtype, heads, kv_heads)
    exact = [x.double() for x in (q, k, v)]
    wanted, wanted_lse = reference_forward(*exact, block)
    out, lse = cpu_flash_forward(q, k, v, block)
    assert (out.shape, lse.shape) == (wanted.shape, wanted_lse.shape)
    torch.testing.assert_close(out.double(), wanted, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=tolerance, atol=tolerance)
    total, total_lse = wanted * 0.7 + 0.1, wanted_lse + 0.4
    got = cpu_flash_backward(dout, Saved(q, k, v, total.to(dtype), total_lse.to(lse.dtype)), block)
    grads = reference_backward(dout.double(), Saved(*exact, total, total_lse), block)
    for grad, expected in zip(got, grads, strict=True):
        assert grad.dtype == dtype
        scale = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
        torch.testing.assert_close(grad.double(), expected, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize(
    "block",
    [
        block_of([9]),
        block_of([1]),
        block_of([1, 200, 3]),
        block_of([0, 4, 0, 0, 1, 0]),
        block_of([70], [5], causal=False),
        block_of([3, 0, 2], [40, 6, 1], causal=False),
        block_of([3, 2, 4], [0, 6, 0], causal=False),
        block_of([1], [1], causal=False),
    ],
    ids=["one", "token", "documents", "empty", "rectangle", "no-queries", "no-keys", "one-pair"],
)
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 1e-5), (torch.bfloat16, 3e-2), (torch.float16, 4e-3), (torch.float64, 1e-12)],
)
def test_cpu_flash_agrees_with_the_reference(block: AttentionBlock, dtype: torch.dtype, tolerance: float) -> None:
    assert_agrees(block, dtype, tolerance)


@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=5),
    st.booleans(),
    st.floats(0.01, 2.0),
)
@settings(max_examples=examples(60), deadline=None)
def test_any_documents(lengths: list[tuple[int, int]], causal: bool, scale: float) -> None:
    lengths_q = [one for one, _ in lengths]
    lengths_k = lengths_q if causal else [other for _, other in lengths]
    assert_agrees(block_of(lengths_q, lengths_k, causal, scale), torch.float64, 1e-10)


@pytest.mark.parametrize("name", ON_CPU)
def test_rows_after_the_documents_are_left_alone(name: str) -> None:
    """Output and gradients of padding are 0 for any values."""
    block = block_of([3, 4])
    q, k, v, dout = (torch.cat((x, torch.full_like(x[:2], torch.nan))) for x in block_tensors(block, torch.float32))
    kernel = kernel_named(name)
    out, lse = kernel.forward(q, k, v, block)
    assert not out[7:].any()
    assert torch.isneginf(lse[:, 7:]).all()
    for grad in kernel.backward(dout, Saved(q, k, v, out, lse), block):
        assert not grad[7:].any()
        assert torch.isfinite(grad).all()


@pytest.mark.parametrize("name", ON_CPU)
@pytest.mark.parametrize("block", [block_of([5, 11]), block_of([4, 3], [9, 2], causal=False)], ids=["causal", "all"])
def test_strided_inputs_give_the_same_bits(name: str, block: AttentionBlock) -> None:
    q, k, v, dout = block_tensors(block, torch.float32)
    kernel = kernel_named(name)
    out, lse = kernel.forward(q, k, v, block)
    grads = kernel.backward(dout, Saved(q, k, v, out, lse), block)
    views = [torch.stack((x, x + 1), dim=1)[:, 0] for x in (q, k, v, dout)]
    assert not any(view.is_contiguous() for view in views)
    *qkv, strided_dout = views
    strided_out, strided_lse = kernel.forward(*qkv, block)
    assert torch.equal(strided_out, out)
    assert torch.equal(strided_lse, lse)
    # The saved sum of one ring pass is a transposed view.
    saved = Saved(*qkv, out, lse.t().contiguous().t())
    of_views = kernel.backward(strided_dout, saved, block)
    assert all(torch.equal(a, b) for a, b in zip(grads, of_views, strict=True))


def test_a_missing_operator_is_named() -> None:
    assert missing_operator("_no_such_operator")() == "this torch has no aten::_no_such_operator"
    assert missing_operator("_flash_attention_forward", "_nor_this")() == "this torch has no aten::_nor_this"
    assert missing_operator("_flash_attention_forward")() is None


@pytest.mark.parametrize(
    "block",
    [
        block_of([9], window=1),
        block_of([9], window=20),
        block_of([1, 200, 3], window=40),
        block_of([0, 4, 0, 1], window=2),
        block_of([3, 50], [9, 90], window=7),
        block_of([70], [75], window=70),
    ],
    ids=["one", "within", "documents", "empty", "keys-before", "long"],
)
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 1e-5), (torch.bfloat16, 3e-2), (torch.float16, 4e-3), (torch.float64, 1e-12)],
)
def test_windows_agree_with_the_reference(block: AttentionBlock, dtype: torch.dtype, tolerance: float) -> None:
    assert_agrees(block, dtype, tolerance)


@pytest.mark.slow
@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 30)), max_size=4),
    st.integers(1, 50),
)
@settings(max_examples=40, deadline=None)
def test_any_window(lengths: list[tuple[int, int]], window: int) -> None:
    """Documents with keys before their first query are computed in pieces of 32 queries."""
    lengths_q = [queries for queries, _ in lengths]
    lengths_k = [queries + before for queries, before in lengths]
    assert_agrees(block_of(lengths_q, lengths_k, window=window), torch.float64, 1e-10)
