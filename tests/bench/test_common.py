"""Turns of arms, and rows of targets."""

from __future__ import annotations

from scripts.bench.report import Target, in_turns


def test_every_other_round_is_reversed() -> None:
    assert in_turns(("a", "b"), 3) == [(0, "a"), (0, "b"), (1, "b"), (1, "a"), (2, "a"), (2, "b")]


def test_rows_of_targets() -> None:
    assert Target("a", 0.2, 0.1, at_most=True).row == "| a | at most 0.1 | 0.2 | **missed** |"
    assert Target("a", 0.2, 0.2, form=".3f").row == "| a | at least 0.2 | 0.200 | met |"
    assert Target("a", None, 0.1).row == "| a | at least 0.1 | - | not measured |"
    assert not Target("a", None, 0.1).is_met
