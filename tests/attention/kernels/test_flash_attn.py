"""Fake flash-attn packages, with the parameters of a version and the arithmetic of the reference."""

from __future__ import annotations

import importlib
import inspect
import sys
import tomllib
import types
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from bytescale_ext.attention.kernels.contract import Saved
from bytescale_ext.attention.kernels.flash_attn import FLASH_ATTN_2, FLASH_ATTN_3, FLASH_ATTN_4, FlashAttn, call_by_name
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


def test_packages_that_are_not_installed_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages = (FLASH_ATTN_2, FLASH_ATTN_3, FLASH_ATTN_4)
    assert [package.missing() for package in packages] == [
        "the package flash_attn is not installed",
        "the package flash_attn_interface is not installed",
        "the package flash_attn.cute is not installed",
    ]
    monkeypatch.syspath_prepend(tmp_path)
    for place, missing in (
        ("flash_attn/cute/interface.py", [True, True, False]),  # version 4 alone, in a package without __init__.py
        ("flash_attn_interface.py", [True, False, False]),
        ("flash_attn/flash_attn_interface.py", [False, False, False]),
    ):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text("raise AssertionError('it was imported')")
        importlib.invalidate_caches()
        assert [package.missing() is not None for package in packages] == missing


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
        assert (k_new, v_new, qv, num_splits) == (None, None, None, 1 if causal else 0)
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


@pytest.mark.slow
def test_custom_operators_are_called_by_name() -> None:
    @torch.library.custom_op("bytescale_test::call_by_name", mutates_args=())
    def operator(q: torch.Tensor, unknown: torch.Tensor | None, scale: float, other: int = 3) -> torch.Tensor:
        assert unknown is None
        assert other == 3
        return q * scale

    result = call_by_name(operator, {"q": torch.ones(2), "scale": 2.0, "v": None})
    assert result.tolist() == [2.0, 2.0]


RECORDED = tomllib.loads((Path(__file__).parent / "signatures.toml").read_text(encoding="utf-8"))["function"]
PACKAGES = (FLASH_ATTN_2, FLASH_ATTN_3, FLASH_ATTN_4)
# What each call must say, under one of these names.
NEEDED = {
    "offsets of queries": ("cu_seqlens_q",),
    "offsets of keys": ("cu_seqlens_k",),
    "longest queries": ("max_seqlen_q",),
    "longest keys": ("max_seqlen_k",),
    "scale": ("softmax_scale",),
    "causal": ("causal", "is_causal"),
    "window": ("window_size_left",),
    "end of the window": ("window_size_right",),
}


class Stub(types.ModuleType):
    """A module with functions of recorded signatures, which note their arguments and return empty outputs."""

    def __init__(self, package: FlashAttn) -> None:
        super().__init__(package.module)
        self.calls: dict[str, dict[str, object]] = {}
        self.optional: dict[str, set[str]] = {}
        for row in RECORDED:
            if row["package"] == package.package:
                self.add(row["name"], row["parameters"])

    def add(self, name: str, recorded: str) -> None:
        parameters = [one.strip() for one in recorded.split(",")]
        self.optional[name] = {one.split("=")[0].rstrip("?") for one in parameters if "=" in one or one.endswith("?")}
        places = [
            inspect.Parameter(one.split("=")[0].rstrip("?"), inspect.Parameter.KEYWORD_ONLY, default=None)
            if "=" in one
            else inspect.Parameter(one.rstrip("?"), inspect.Parameter.KEYWORD_ONLY)
            for one in parameters
        ]

        def function(**arguments: object) -> tuple[torch.Tensor, ...]:
            function.__signature__.bind(**arguments)
            self.calls[name] = arguments
            return tuple(torch.empty(0) for _ in range(4))

        function.__signature__ = inspect.Signature(places)  # type: ignore[attr-defined]
        setattr(self, name, function)


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.package)
@pytest.mark.parametrize("window", [None, 3], ids=["all keys", "window"])
def test_calls_fit_the_recorded_signatures(
    monkeypatch: pytest.MonkeyPatch, package: FlashAttn, window: int | None
) -> None:
    stub, block = Stub(package), block_of([7, 2], window=window)
    for part in range(1, package.module.count(".") + 1):
        monkeypatch.setitem(sys.modules, package.module.rsplit(".", part)[0], types.ModuleType("parent"))
    monkeypatch.setitem(sys.modules, package.module, stub)
    q, k, v, dout = block_tensors(block, torch.float32)
    package.forward(q, k, v, block)
    package.backward(dout, Saved(q, k, v, q, torch.zeros(q.shape[1], q.shape[0])), block)
    forward, backward = stub.calls[package.forward_name], stub.calls[package.backward_name]
    for name, call in stub.calls.items():
        for meaning, names in NEEDED.items():
            assert any(one in call for one in names), (name, meaning)
        nones = {argument for argument, value in call.items() if value is None}
        assert nones <= stub.optional[name], nones - stub.optional[name]
        left = call["window_size_left"]
        assert left == (package.no_window if window is None else 3)
    assert all(backward[one] is not None for one in ("dout", "out", "dq", "dk", "dv"))
    assert ("lse" in backward) != ("softmax_lse" in backward)
    assert "deterministic" in backward
    assert forward.get("return_lse", True)


def test_few_queries_let_version_3_divide_the_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    stub = Stub(FLASH_ATTN_3)
    monkeypatch.setitem(sys.modules, FLASH_ATTN_3.module, stub)
    for block, num_splits in ((block_of([3], [90], causal=False), 0), (block_of([90], causal=False), 1)):
        q, k, v, _ = block_tensors(block, torch.float32)
        FLASH_ATTN_3.forward(q, k, v, block)
        assert stub.calls["_flash_attn_forward"]["num_splits"] == num_splits
