"""Parts of Megatron's start that are left out."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from megatron.bytescale.training.initialize import wrap_compile_helpers, wrap_set_jit_fusion_options


def test_the_dataset_helper_is_compiled_only_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    wrapped = wrap_compile_helpers(lambda: calls.append("make"), None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    wrapped()
    assert calls == []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    wrapped()
    assert calls == ["make"]


def test_fused_kernels_are_not_warmed_up() -> None:
    def original(**options: Any) -> None:
        raise AssertionError(f"warmed up with {options}")

    wrap_set_jit_fusion_options(original, None)(tp_size=2)
