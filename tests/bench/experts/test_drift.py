"""Drifting loads, and the placements that follow them."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest

from scripts.bench.experts import drift


def test_loads_are_uneven_and_drift() -> None:
    loads = drift.drifting_loads(drift.Drift(0.1), 60, seed=1)
    assert loads.shape == (60, 1, drift.RANKS, drift.EXPERTS)
    assert loads.min() >= 0
    assert (loads.sum((1, 3)) <= drift.TOKENS / drift.RANKS).all()
    assert (loads.sum((1, 3)) > 0.99 * drift.TOKENS / drift.RANKS).all()
    assert 0.4 < drift.share_of_top_ten(loads) < 0.8
    totals = loads.sum((1, 2)).astype(float)
    near, far = (np.corrcoef(totals[0], totals[step])[0, 1] for step in (1, 59))
    assert near > 0.9 > far


@pytest.mark.slow
def test_flexmoe_follows_with_few_moves() -> None:
    static, flexmoe, eplb = drift.figures(0.1, steps=60, seeds=1)
    assert static["ratio_mean"] > 2
    assert flexmoe["ratio_mean"] <= 1.20
    assert flexmoe["ratio_p95"] <= 1.5
    assert flexmoe["moves_per_step"] < 1 < eplb["moves_per_step"]
    assert flexmoe["step_ms"] < eplb["step_ms"] < static["step_ms"]


def test_it_prints_a_row_for_each_placement(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["drift.py", "--drift", "0.05", "--steps", "4", "--seeds", "1"]
    monkeypatch.setattr(sys, "argv", words)
    drift.main()
    assert [line.split()[3] for line in capsys.readouterr().out.splitlines()] == ["static", "flexmoe", "eplb"]
    monkeypatch.setattr(sys, "argv", [*words, "--json"])
    drift.main()
    assert [row["placement"] for row in json.loads(capsys.readouterr().out)] == ["static", "flexmoe", "eplb"]
