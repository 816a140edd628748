"""The bench of paged states runs on CPU with tiny sizes, and both arms give the same parameters."""

from __future__ import annotations

import json
import sys

import pytest

from scripts.bench.states import gpu_states


def test_it_measures(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_states.py", "--device", "cpu", "--quick", "--json"])
    gpu_states.main()
    text, figures = capsys.readouterr().out.strip().splitlines()
    results = json.loads(figures)
    assert text.startswith("0.1 M parameters: resident ")
    assert text.endswith("; equal results")
    assert results["equal"]
    assert results["pages"] == 3 * -(-100_000 * 4 // 65536)
    assert all(results[f"{name}_seconds"] > 0 for name in ("resident", "paged", "predicted"))
