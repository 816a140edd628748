"""Fake flash-attn packages, with the parameters of a version and the arithmetic of the reference."""

from __future__ import annotations

import sys
import types
from collections.abc import Sequence

import pytest
import torch

from bytescale_ext.attention.kernels.contract import Saved
from bytescale_ext.attention.kernels.flash_attn import FLASH_ATTN_2, FLASH_ATTN_3, FlashAttn, call_by_name
from bytescale_ext.attention.kernels.reference import reference_backward, reference_forward
from bytescale_ext.attention.layouts.blocks import AttentionBlock
from bytescale_ext.attention.layouts.rows import CuSeqlens
from tests.attention.cases import block_of, block_tensors

BLOCKS = [
    block_of([7, 2]),
    block_of([3, 7], [7, 1], causal=False),
    block_of([7, 2], window=4),
    block_of([5, 7], [7, 7], window=3),
]


def test_packages_that_are_not_installed_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert FLASH_ATTN_2.missing() == "the package flash_attn is not installed"
    assert FLASH_ATTN_3.missing() == "the package flash_attn_interface is not installed"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert FLASH_ATTN_2.missing() is FLASH_ATTN_3.missing() is None


def block_from(
    offsets: Sequence[torch.Tensor], causal: bool, scale: float, left: int, right: int | None = None
) -> AttentionBlock:
    """Return the block of a call to a package; offsets must be int32, and a window ends with the query's own key."""
    assert all(tensor.dtype == torch.int32 for tensor in offsets)
    assert right in (None, -1 if left == -1 else 0)
    cu_q, cu_k = (CuSeqlens(tuple(tensor.tolist())) for tensor in offsets)
    return AttentionBlock(cu_q, cu_k, causal, scale, None if left == -1 else left)


class Version2(types.ModuleType):
    """flash-attn 2; before 2.7 (``padded``) it returned the padded inputs as well."""

    def __init__(self, padded: bool) -> None:
        super().__init__("fake")
        self.padded = padded

    def _flash_attn_varlen_forward(
        self, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size, alibi_slopes, softcap=1.0,
    ):  # type: ignore[no-untyped-def]  # fmt: skip
        assert (dropout_p, alibi_slopes, softcap) == (0.0, None, 0.0)
        assert (max_seqlen_q, max_seqlen_k) == (7, 7)
        block = block_from((cu_seqlens_q, cu_seqlens_k), causal, softmax_scale, *window_size)
        out, lse = reference_forward(q, k, v, block)
        return (out, q, k, v, out, lse, None, None) if self.padded else (out, lse, None, None)

    def _flash_attn_varlen_backward(
        self, dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic,
    ):  # type: ignore[no-untyped-def]  # fmt: skip
        assert (dropout_p, softcap) == (0.0, 0.0)
        assert (alibi_slopes, deterministic) == (None, torch.are_deterministic_algorithms_enabled())
        assert softmax_lse.is_contiguous()
        offsets = (cu_seqlens_q, cu_seqlens_k)
        block = block_from(offsets, causal, softmax_scale, window_size_left, window_size_right)
        grads = reference_backward(dout, Saved(q, k, v, out, softmax_lse), block)
        for target, grad in zip((dq, dk, dv), grads, strict=True):
            target.copy_(grad)


class Version3(types.ModuleType):
    """flash-attn 3, with other names, another order, and parameters that version 2 does not have."""

    def _flash_attn_forward(
        self, q, k, v, k_new, v_new, qv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale,
        causal, window_size=(-1, -1), softcap=0.0, num_splits=1,
    ):  # type: ignore[no-untyped-def]  # fmt: skip
        assert (k_new, v_new, qv, num_splits) == (None, None, None, 1)
        assert (max_seqlen_q, max_seqlen_k) == (7, 7)
        block = block_from((cu_seqlens_q, cu_seqlens_k), causal, softmax_scale, *window_size)
        return *reference_forward(q, k, v, block), None, None

    def _flash_attn_backward(
        self, dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, sequed_q, sequed_k, max_seqlen_q,
        max_seqlen_k, dq, dk, dv, softmax_scale, is_causal, window_size_left, deterministic=True,
    ):  # type: ignore[no-untyped-def]  # fmt: skip
        assert (sequed_q, sequed_k) == (None, None)
        assert deterministic == torch.are_deterministic_algorithms_enabled()
        block = block_from((cu_seqlens_q, cu_seqlens_k), is_causal, softmax_scale, window_size_left)
        for target, grad in zip(
            (dq, dk, dv), reference_backward(dout, Saved(q, k, v, out, softmax_lse), block), strict=True
        ):
            target.copy_(grad)


@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
@pytest.mark.parametrize("block", BLOCKS, ids=["causal", "all", "window", "keys before"])
@pytest.mark.parametrize(
    ("package", "module"),
    [(FLASH_ATTN_2, Version2(padded=True)), (FLASH_ATTN_2, Version2(padded=False)), (FLASH_ATTN_3, Version3("fake"))],
    ids=["before 2.7", "2.7", "3"],
)
def test_versions_are_called_by_name(
    monkeypatch: pytest.MonkeyPatch,
    package: FlashAttn,
    module: types.ModuleType,
    block: AttentionBlock,
    deterministic: bool,
) -> None:
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, package.module, module)
    q, k, v, dout = block_tensors(block, torch.float32)
    out, lse = package.forward(q, k, v, block)
    wanted, wanted_lse = reference_forward(q, k, v, block)
    assert torch.equal(out, wanted)
    assert torch.equal(lse, wanted_lse)
    grads = package.backward(dout, Saved(q, k, v, out, lse.t().contiguous().t()), block)
    expected = reference_backward(dout, Saved(q, k, v, out, lse), block)
    assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))


def test_custom_operators_are_called_by_name() -> None:
    @torch.library.custom_op("bytescale_test::call_by_name", mutates_args=())
    def operator(q: torch.Tensor, unknown: torch.Tensor | None, scale: float, other: int = 3) -> torch.Tensor:
        assert unknown is None
        assert other == 3
        return q * scale

    result = call_by_name(operator, {"q": torch.ones(2), "scale": 2.0, "v": None})
    assert result.tolist() == [2.0, 2.0]
