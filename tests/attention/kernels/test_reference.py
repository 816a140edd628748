"""The reference kernel against torch's own attention, against autograd and against dense attention with a mask."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from bytescale_ext.attention.kernels.contract import Saved, accumulation_dtype
from bytescale_ext.attention.kernels.reference import reference_backward, reference_forward
from tests.attention.cases import block_of, dense_attention

DOCUMENTS = (5, 1, 0, 7)


def values(*shapes: tuple[int, int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(rows, heads, 8, generator=generator, dtype=torch.float64) for rows, heads in shapes]


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_documents_agree_with_torch(kv_heads: int) -> None:
    q, k, v, dout = values((13, 4), (13, kv_heads), (13, kv_heads), (13, 4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    parts = [
        scaled_dot_product_attention(
            *(x[start:stop].transpose(0, 1)[None] for x in leaves), is_causal=True, scale=0.2, enable_gqa=True
        )[0].transpose(0, 1)
        for start, stop in ((0, 5), (5, 6), (6, 13))
    ]
    expected = torch.cat(parts)
    wanted = torch.autograd.grad(expected, leaves, dout)
    block = block_of(DOCUMENTS, scale=0.2)
    with torch.no_grad():
        out, lse = reference_forward(q, k, v, block)
        grads = reference_backward(dout, Saved(q, k, v, out, lse), block)
    for got, want in zip((out, *grads), (expected, *wanted), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_documents_agree_with_a_mask_over_all_rows(kv_heads: int) -> None:
    """The oracle of the rings and the oracle of the kernels share no code."""
    q, k, v, dout = values((15, 4), (15, kv_heads), (15, kv_heads), (15, 4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    dense = dense_attention(*leaves, DOCUMENTS, 0.3)
    wanted = (dense, *torch.autograd.grad(dense, leaves, dout))
    with torch.no_grad():
        out, lse = reference_forward(q, k, v, block_of(DOCUMENTS))
        grads = reference_backward(dout, Saved(q, k, v, out, lse), block_of(DOCUMENTS))
    for got, want in zip((out, *grads), wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
        assert not got[13:].any()


@pytest.mark.parametrize("window", [1, 3, 20])
@pytest.mark.parametrize("num_queries", [13, 4, 1])
def test_windows_agree_with_a_band_over_all_rows(window: int, num_queries: int) -> None:
    """Dense attention of the last queries of a document. The last key belongs to the last query."""
    q, k, v, dout = values((13, 4), (13, 2), (13, 2), (num_queries, 4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    dense = dense_attention(*leaves, (13,), 0.3, window)[-num_queries:]
    dq, dk, dv = torch.autograd.grad(dense, leaves, dout)
    block = block_of([num_queries], [13], window=window)
    with torch.no_grad():
        out, lse = reference_forward(q[-num_queries:], k, v, block)
        grads = reference_backward(dout, Saved(q[-num_queries:], k, v, out, lse), block)
    for got, want in zip((out, *grads), (dense, dq[-num_queries:], dk, dv), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("num_queries", "num_keys", "causal"), [(7, 7, True), (3, 9, False), (9, 1, False)])
def test_block_backward_agrees_with_autograd(num_queries: int, num_keys: int, causal: bool) -> None:
    q, k, v, dout = values((num_queries, 4), (num_keys, 2), (num_keys, 2), (num_queries, 4))
    block = block_of([num_queries], [num_keys], causal, 0.4)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = reference_forward(*leaves, block)
    wanted = torch.autograd.grad(out, leaves, dout)
    with torch.no_grad():
        got = reference_backward(dout, Saved(q, k, v, out, lse), block)
    for grad, expected in zip(got, wanted, strict=True):
        torch.testing.assert_close(grad, expected, rtol=1e-12, atol=1e-12)


def test_queries_without_keys_give_nothing() -> None:
    """Documents without keys run alone, and next to a document with keys."""
    q, k, v, dout = values((5, 4), (3, 2), (3, 2), (5, 4))
    block = block_of([3, 2], [0, 3], causal=False)
    out, lse = reference_forward(q, k, v, block)
    assert not out[:3].any()
    assert torch.isneginf(lse[:, :3]).all()
    assert out[3:].all()
    assert torch.isfinite(lse[:, 3:]).all()
    dq, dk, _ = reference_backward(dout, Saved(q, k, v, out, lse), block)
    assert not dq[:3].any()
    assert dq[3:].all()
    assert dk.all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    q, k, v = (x.to(dtype) for x in values((6, 4), (6, 2), (6, 2)))
    out, lse = reference_forward(q, k, v, block_of([6]))
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    assert accumulation_dtype(dtype) == torch.float32
    exact, _ = reference_forward(q.double(), k.double(), v.double(), block_of([6]))
    torch.testing.assert_close(out.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-6)
