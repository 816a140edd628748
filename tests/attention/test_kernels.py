"""The kernel table: each kernel that runs here against the reference, and the choice between them."""

from __future__ import annotations

import dataclasses
import sys
import types

import pytest
import torch

from bytescale_ext.attention import flash_attn_package, torch_kernels
from bytescale_ext.attention.kernels import Kernel, KernelCalls, choose_kernel, counting, kernel_table, probe
from bytescale_ext.attention.rows import CuSeqlens

CPU = torch.device("cpu")


def kernel(name: str) -> Kernel:
    return next(row for row in kernel_table() if row.name == name)


def block(lengths_q: list[int], lengths_k: list[int], dtype: torch.dtype) -> tuple[object, ...]:
    """``q, k, v, dout, cu_q, cu_k`` of documents of these lengths."""
    cu_q, cu_k = CuSeqlens.of_lengths(lengths_q), CuSeqlens.of_lengths(lengths_k)
    generator = torch.Generator().manual_seed(1)
    rows = ((cu_q.num_tokens, 4), (cu_k.num_tokens, 2), (cu_k.num_tokens, 2), (cu_q.num_tokens, 4))
    return (*(torch.randn(t, heads, 16, generator=generator).to(dtype) for t, heads in rows), cu_q, cu_k)


@pytest.mark.parametrize(
    ("lengths_q", "lengths_k", "causal"),
    [([9], [9], True), ([1, 200, 3], [1, 200, 3], True), ([70], [5], False), ([3, 0, 2], [40, 6, 1], False)],
)
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 1e-5), (torch.bfloat16, 3e-2), (torch.float16, 4e-3), (torch.float64, 1e-12)],
)
def test_cpu_flash_agrees_with_the_reference(
    lengths_q: list[int], lengths_k: list[int], causal: bool, dtype: torch.dtype, tolerance: float
) -> None:
    q, k, v, dout, cu_q, cu_k = block(lengths_q, lengths_k, dtype)
    out, lse = torch_kernels.cpu_flash_forward(q, k, v, cu_q, cu_k, causal, 0.3)
    exact = [x.double() for x in (q, k, v)]
    wanted, wanted_lse = torch_kernels.reference_documents_forward(*exact, cu_q, cu_k, causal, 0.3)
    assert out.shape == wanted.shape and lse.shape == wanted_lse.shape
    torch.testing.assert_close(out.double(), wanted, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=tolerance, atol=tolerance)
    # As in a ring: the output and the sum cover other keys too.
    total, total_lse = wanted * 0.7 + 0.1, wanted_lse + 0.4
    got = torch_kernels.cpu_flash_backward(
        dout, q, k, v, total.to(dtype), total_lse.to(lse.dtype), cu_q, cu_k, causal, 0.3
    )
    grads = torch_kernels.reference_documents_backward(dout.double(), *exact, total, total_lse, cu_q, cu_k, causal, 0.3)
    for grad, expected in zip(got, grads, strict=True):
        scale = float(expected.abs().max())
        torch.testing.assert_close(grad.double(), expected, rtol=tolerance, atol=tolerance * scale)


def test_calls_are_counted_and_change_nothing() -> None:
    q, k, v, dout, cu_q, cu_k = block([5, 11], [5, 11], torch.float32)
    plain = kernel("cpu_flash")
    counted, calls = counting(plain)
    _, others = counting(plain)
    for _ in range(2):
        out, lse = counted.forward(q, k, v, cu_q, cu_k, True, 0.3)
    grads = counted.backward(dout, q, k, v, out, lse, cu_q, cu_k, True, 0.3)
    assert (calls, others) == (KernelCalls(num_forward=2, num_backward=1), KernelCalls())
    assert torch.equal(out, plain.forward(q, k, v, cu_q, cu_k, True, 0.3)[0])
    wanted = plain.backward(dout, q, k, v, out, lse, cu_q, cu_k, True, 0.3)
    assert all(torch.equal(a, b) for a, b in zip(grads, wanted, strict=True))
    assert dataclasses.replace(counted, forward=plain.forward, backward=plain.backward) == plain


def test_strided_inputs_are_taken() -> None:
    q, k, v, dout, cu_q, cu_k = block([5, 11], [5, 11], torch.float32)
    mixed = torch.cat((q, k, v), dim=1)
    views = mixed.split((4, 2, 2), dim=1)
    for row in (kernel("cpu_flash"), kernel("reference")):
        out, lse = row.forward(q, k, v, cu_q, cu_k, True, 0.3)
        assert torch.equal(row.forward(*views, cu_q, cu_k, True, 0.3)[0], out)
        grads = row.backward(dout, q, k, v, out, lse, cu_q, cu_k, True, 0.3)
        of_views = row.backward(dout, *views, out, lse, cu_q, cu_k, True, 0.3)
        assert all(torch.equal(a, b) for a, b in zip(grads, of_views, strict=True))


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.float64, "reference"),
        (torch.float32, "cpu_flash"),
        (torch.bfloat16, "cpu_flash"),
        (torch.float16, "cpu_flash"),
    ],
)
def test_choice_on_cpu(dtype: torch.dtype, name: str) -> None:
    choice = choose_kernel("cpu", dtype, head_dim=24)
    assert choice.kernel.name == name and str(dtype) in choice.reason
    passed_over = [row.name for row in kernel_table()]
    assert [row for row, _ in choice.considered] == passed_over[: passed_over.index(name)]
    assert all("not" in why for _, why in choice.considered)


def test_a_kernel_can_be_named() -> None:
    assert choose_kernel("cpu", torch.float32, 8, name="reference").kernel.name == "reference"
    with pytest.raises(ValueError, match="choose one of flash_attn_3, flash_attn, torch_flash"):
        choose_kernel("cpu", torch.float32, 8, name="flash")
    with pytest.raises(ValueError, match="runs on cuda, not on cpu"):
        choose_kernel("cpu", torch.bfloat16, 8, name="torch_flash")
    with pytest.raises(ValueError, match="not torch.float64"):
        choose_kernel("cpu", torch.float64, 8, name="cpu_flash")


def test_limits_of_a_kernel() -> None:
    cuda = torch.device("cuda")
    row = dataclasses.replace(kernel("torch_flash"), missing=lambda: "not built")
    assert "multiple of 8 up to 256, got 12" in str(row.why_not(cuda, torch.bfloat16, 12))
    assert "got 264" in str(row.why_not(cuda, torch.bfloat16, 264))
    assert "not torch.float32" in str(row.why_not(cuda, torch.float32, 64))
    assert row.why_not(cuda, torch.float16, 64) == "not built"
    assert kernel("torch_flash").why_not(cuda, torch.float16, 64) is None
    assert torch_kernels.missing_operator("_no_such_operator")() == "this torch has no aten::_no_such_operator"


def test_probe_finds_wrong_and_broken_kernels() -> None:
    good = kernel("cpu_flash")
    assert probe(good, CPU, torch.float32, 16) is None

    def own_sum(dout, q, k, v, out, lse, cu_q, cu_k, causal, scale):  # type: ignore[no-untyped-def]
        """A backward that ignores the sum over all keys, as one made for whole documents might."""
        own_out, own_lse = good.forward(q, k, v, cu_q, cu_k, causal, scale)
        return good.backward(dout, q, k, v, own_out, own_lse, cu_q, cu_k, causal, scale)

    def failing(*arguments: object) -> tuple[torch.Tensor, torch.Tensor]:
        raise TypeError("got an unexpected keyword argument")

    def of_nan(q, *rest):  # type: ignore[no-untyped-def]
        out, lse = good.forward(q, *rest)
        return out * float("nan"), lse

    assert "differs" in str(probe(dataclasses.replace(good, backward=own_sum), CPU, torch.float32, 16))
    assert "unexpected keyword" in str(probe(dataclasses.replace(good, forward=failing), CPU, torch.float32, 16))
    assert "differs" in str(probe(dataclasses.replace(good, forward=of_nan), CPU, torch.float32, 16))


def test_flash_attn_is_passed_over_when_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "flash_attn is not installed" in str(flash_attn_package.missing_2())
    assert "flash-attn 3" in str(flash_attn_package.missing_3())


class FakePackage(types.ModuleType):
    """flash-attn with the parameters of a version, computed by the reference."""

    def __init__(self, padded: bool) -> None:
        super().__init__("fake")
        self.padded = padded

    def _flash_attn_varlen_forward(
        self, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size, alibi_slopes, softcap=1.0,
    ):  # type: ignore[no-untyped-def]  # fmt: skip
        assert (dropout_p, window_size, alibi_slopes, softcap) == (0.0, (-1, -1), None, 0.0)
        assert (max_seqlen_q, max_seqlen_k) == (7, 7) and cu_seqlens_q.dtype == torch.int32
        documents = CuSeqlens(tuple(cu_seqlens_q.tolist()))
        out, lse = torch_kernels.reference_documents_forward(q, k, v, documents, documents, causal, softmax_scale)
        return (out, q, k, v, out, lse, None, None) if self.padded else (out, lse, None, None)

    def _flash_attn_varlen_backward(
        self, dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic,
    ):  # type: ignore[no-untyped-def]  # fmt: skip
        assert (window_size_left, window_size_right, deterministic) == (-1, -1, False)
        documents = CuSeqlens(tuple(cu_seqlens_q.tolist()))
        grads = torch_kernels.reference_documents_backward(
            dout, q, k, v, out, softmax_lse, documents, documents, causal, softmax_scale
        )
        for target, grad in zip((dq, dk, dv), grads, strict=True):
            target.copy_(grad)


@pytest.mark.parametrize("padded", [True, False])
def test_flash_attn_versions_are_called_by_name(monkeypatch: pytest.MonkeyPatch, padded: bool) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, flash_attn_package.FLASH_ATTN_2, FakePackage(padded))
    q, k, v, dout, cu_q, cu_k = block([7, 2], [7, 2], torch.float32)
    out, lse = flash_attn_package.forward_2(q, k, v, cu_q, cu_k, True, 0.3)
    wanted, wanted_lse = torch_kernels.reference_documents_forward(q, k, v, cu_q, cu_k, True, 0.3)
    assert torch.equal(out, wanted) and torch.equal(lse, wanted_lse)
    grads = flash_attn_package.backward_2(dout, q, k, v, out, lse, cu_q, cu_k, True, 0.3)
    expected = torch_kernels.reference_documents_backward(dout, q, k, v, out, lse, cu_q, cu_k, True, 0.3)
    assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))


def test_custom_operators_are_called_by_name() -> None:
    @torch.library.custom_op("bytescale_test::call_by_name", mutates_args=())
    def operator(q: torch.Tensor, unknown: torch.Tensor | None, scale: float, other: int = 3) -> torch.Tensor:
        assert unknown is None and other == 3
        return q * scale

    result = flash_attn_package.call_by_name(operator, {"q": torch.ones(2), "scale": 2.0, "v": None})
    assert result.tolist() == [2.0, 2.0]
