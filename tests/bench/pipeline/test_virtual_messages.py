"""The comparison of messages of virtual stages, on processes that hardly wait."""

from __future__ import annotations

import json
import sys

import pytest

from scripts.bench.pipeline import virtual_messages


@pytest.mark.ranks
def test_both_arms_run_in_one_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = "--stages 2 --micro-batches 2 --slices 2 --megabytes 0.01 --milliseconds 0.1 --rounds 2 --json"
    monkeypatch.setattr(sys, "argv", ["virtual_messages.py", *words.split()])
    assert virtual_messages.main() == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(figures["step_seconds"]) == {"in line", "overlapped"}
    # Each stage: 8 forward passes of one unit and 8 backward passes of two, and the fill of 1 + 2 units.
    assert figures["step_seconds_without_messages"] == pytest.approx((8 * 3 + 3) * 1e-4)
    assert min(figures["step_seconds"].values()) > 8 * 3 * 1e-4
    assert figures["ratios"][0] <= figures["overlapped_over_in_line"] <= figures["ratios"][1]
