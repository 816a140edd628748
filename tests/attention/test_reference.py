"""The oracle against torch's own attention and against autograd."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from bytescale_ext.attention.reference import (
    accumulation_dtype,
    dense_attention,
    reference_backward,
    reference_forward,
)
from bytescale_ext.attention.rows import CuSeqlens


def values(*shapes: tuple[int, int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(rows, heads, 8, generator=generator, dtype=torch.float64) for rows, heads in shapes]


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_documents_agree_with_torch(kv_heads: int) -> None:
    documents = CuSeqlens((0, 5, 6, 13))
    q, k, v, dout = values((15, 4), (15, kv_heads), (15, kv_heads), (15, 4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = dense_attention(q, k, v, documents, scale=0.2)
    parts = [
        scaled_dot_product_attention(
            *(x[start:stop].transpose(0, 1)[None] for x in leaves), is_causal=True, scale=0.2, enable_gqa=True
        )[0].transpose(0, 1)
        for start, stop in ((0, 5), (5, 6), (6, 13))
    ]
    expected = torch.cat((*parts, torch.zeros(2, 4, 8, dtype=torch.float64)))
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    grads = torch.autograd.grad(out, leaves, dout)
    for grad, wanted in zip(grads, torch.autograd.grad(expected, leaves, dout), strict=True):
        torch.testing.assert_close(grad, wanted, rtol=1e-12, atol=1e-12)
        assert not grad[13:].any()


@pytest.mark.parametrize(("num_queries", "num_keys", "causal"), [(7, 7, True), (3, 9, False), (9, 1, False)])
def test_block_backward_agrees_with_autograd(num_queries: int, num_keys: int, causal: bool) -> None:
    q, k, v, dout = values((num_queries, 4), (num_keys, 2), (num_keys, 2), (num_queries, 4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = reference_forward(q, k, v, causal, 0.4)
    wanted = torch.autograd.grad(out, leaves, dout)
    with torch.no_grad():
        got = reference_backward(dout, q, k, v, out, lse, causal, 0.4)
    for grad, expected in zip(got, wanted, strict=True):
        torch.testing.assert_close(grad, expected, rtol=1e-12, atol=1e-12)


def test_gradients_of_blocks_add_up() -> None:
    q, k, v, dout = values((5, 4), (9, 2), (9, 2), (5, 4))
    out, lse = reference_forward(q, k, v, False, 0.4)
    dq, dk, dv = reference_backward(dout, q, k, v, out, lse, False, 0.4)
    first = reference_backward(dout, q, k[:4], v[:4], out, lse, False, 0.4)
    second = reference_backward(dout, q, k[4:], v[4:], out, lse, False, 0.4)
    torch.testing.assert_close(first[0] + second[0], dq)
    torch.testing.assert_close(torch.cat((first[1], second[1])), dk)
    torch.testing.assert_close(torch.cat((first[2], second[2])), dv)


def test_no_keys_give_nothing() -> None:
    q, k = values((3, 4), (0, 2))
    out, lse = reference_forward(q, k, k, False, 1.0)
    assert not out.any() and lse.shape == (4, 3) and torch.isneginf(lse).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    q, k, v = (x.to(dtype) for x in values((6, 4), (6, 2), (6, 2)))
    out, lse = reference_forward(q, k, v, True, 0.3)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32) and accumulation_dtype(dtype) == torch.float32
    exact, _ = reference_forward(q.double(), k.double(), v.double(), True, 0.3)
    torch.testing.assert_close(out.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-6)
