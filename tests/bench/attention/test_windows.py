"""The benchmark of windows counts pairs as a mask does, and runs with tiny sizes."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "bench" / "attention" / "windows.py"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("windows_bench", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("num_tokens", "window"), [(1, None), (9, None), (9, 1), (9, 3), (9, 8), (9, 20), (50, 7)])
def test_pairs_are_those_of_the_mask(bench: ModuleType, num_tokens: int, window: int | None) -> None:
    mask = torch.ones(num_tokens, num_tokens).tril()
    if window is not None:
        mask = mask.triu(-window)
    assert bench.num_pairs(num_tokens, window) == int(mask.sum())


def test_every_window_has_a_row(bench: ModuleType) -> None:
    rows = bench.measure(torch.device("cpu"), 64, [4, 200], rounds=1)
    assert [row["window"] for row in rows] == [4, 200]
    assert [row["work"] for row in rows] == pytest.approx([2080 / 310, 1.0])
    assert all(row["measured"] > 0 for row in rows)


def test_the_window_reaches_the_kernel(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full round, the first not counted, and the same sequence for each arm."""
    asked = []

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: object) -> tuple[torch.Tensor, torch.Tensor]:
        asked.append((block.window, block.causal, tuple(q.shape)))  # type: ignore[attr-defined]
        return q, q[:, :, 0].t()

    kernel = SimpleNamespace(forward=forward, backward=lambda dout, saved, block: None)
    monkeypatch.setattr(bench, "choose_kernel", lambda *args, **kwargs: SimpleNamespace(kernel=kernel))
    bench.measure(torch.device("cpu"), 32, [4], rounds=2)
    assert asked == [(None, True, (32, 8, 64)), (4, True, (32, 8, 64))] * 3


def test_the_printed_rows(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line for each window and, as the last one, JSON."""
    words = ["--device", "cpu", "--tokens", "48", "--windows", "4", "16", "--rounds", "1", "--json"]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *words])
    bench.main()
    first, *lines, last = capsys.readouterr().out.splitlines()
    assert first == "48 tokens on cpu: times as fast as full attention"
    rows = json.loads(last)["rows"]
    assert [row["window"] for row in rows] == [4, 16]
    for line, row in zip(lines, rows, strict=True):
        words = line.split()
        assert words[:2] == ["window", str(row["window"])]
        assert float(words[3]) == pytest.approx(row["measured"], abs=0.01)
        assert float(words[5]) == pytest.approx(row["work"], abs=0.01)
