"""Reasons against kernels that are chosen by a probe."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from bytescale_ext.attention.kernels.probes import failure, why_not_triton


def test_triton_needs_cuda_and_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_not_triton(torch.device("cpu")) == "it runs on cuda, not on cpu"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert why_not_triton(torch.device("cuda")) is None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert why_not_triton(torch.device("cuda")) == "the package triton is not installed"


def test_a_long_error_is_cut() -> None:
    assert failure(RuntimeError("x" * 300)) == f"its probe failed: RuntimeError: {'x' * 200}"
