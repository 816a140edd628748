"""Targets of the GPU bench of activations, on hand-made rows."""

from __future__ import annotations

from typing import Any

import pytest

from scripts.bench.activation.activation_verdicts import (
    arms_at,
    fair_pair,
    ideal_seconds,
    longest,
    swept_best,
    verdicts,
)


def row(arm: str, tokens: int, seconds: float, **more: Any) -> dict[str, Any]:
    made = {"alpha": 0.0, "overflowed_bytes": 0, "peak_allocated_gb": 0.0, "predicted_peak_gb": None,
            "whole_layers": 2}  # fmt: skip
    return {"arm": arm, "num_tokens": tokens, "step_seconds": seconds, **made, **more}


def sweep(tokens: int, times: dict[float, float]) -> list[dict[str, Any]]:
    return [row(f"alpha {alpha:g}", tokens, seconds, alpha=alpha) for alpha, seconds in times.items()]


ROWS = [
    {"arm": "none", "num_tokens": 131072, "error": "out of memory"},
    row("full recompute", 131072, 13.0),
    row("keep attention output", 131072, 10.9),
    row("priced", 131072, 10.1, peak_allocated_gb=50.0, predicted_peak_gb=51.0),
    row("memo", 131072, 10.3, alpha=0.92, peak_allocated_gb=50.0, predicted_peak_gb=40.0),
    *sweep(131072, {0.0: 11.0, 0.5: 10.6, 0.9: 10.2, 1.0: 10.4}),
    row("none", 16384, 1.0),
    row("full recompute", 16384, 1.2),
    row("priced", 16384, 1.1),
]


def test_targets_of_rows() -> None:
    targets = verdicts(ROWS, {131072: 0.5, 16384: 0.02}, 8, {"none": 60_000, "priced": 300_000})
    assert {target.text: (pytest.approx(target.value), target.is_met) for target in targets} == {
        "131072: speed of priced over full recompute": (13.0 / 10.1, True),
        "131072: excess of priced over the ideal without transfers": (10.1 / 10.0 - 1, True),
        "131072: time of priced over keeping the attention output": (10.1 / 10.9, True),
        "131072: difference of the predicted alpha from the swept best, 0.9": (0.02, True),
        "131072: error of the predicted device peak of priced": (0.02, True),
        "131072: error of the predicted device peak of memo": (0.2, False),
        "16384: speed of priced over full recompute": (1.2 / 1.1, False),
        "longest sequence, priced over none": (5.0, True),
    }


def test_arms_that_did_not_run_decide_nothing() -> None:
    assert verdicts(ROWS[:1], {}, 8, {}) == []
    assert swept_best(arms_at(ROWS, 16384)) is None


def test_only_arms_with_the_same_number_of_whole_layers_are_compared() -> None:
    arms = {
        "full recompute": row("full recompute", 1, 12.0),
        "full recompute, inputs on host": row("full recompute, inputs on host", 1, 1.0, whole_layers=8),
        "priced": row("priced", 1, 8.0, whole_layers=8),
    }
    assert fair_pair(arms, "full recompute") is None
    arms["priced, no memory to spare"] = row("priced, no memory to spare", 1, 9.0)
    assert fair_pair(arms, "full recompute") == ("priced, no memory to spare", 0.75)
    arms["priced"]["whole_layers"] = 5
    arms["full recompute, 5 layers whole"] = row("full recompute, 5 layers whole", 1, 10.0, whole_layers=5)
    assert fair_pair(arms, "full recompute") == ("priced", 0.8)


def test_the_ideal_is_no_policy_if_it_fits() -> None:
    assert ideal_seconds(arms_at(ROWS, 16384), 0.02, 8) == 1.0
    assert ideal_seconds(arms_at(ROWS, 131072), 0.375, 8) == 13.0 - 6 * 0.375
    assert ideal_seconds({}, 0.375, 8) is None


def test_an_arm_that_overflowed_host_memory_is_not_the_best() -> None:
    rows = sweep(1, {0.1: 3.0, 0.2: 2.0})
    rows.append(row("alpha 0.9", 1, 1.0, alpha=0.9, overflowed_bytes=5))
    assert swept_best(arms_at(rows, 1)) == 0.2


@pytest.mark.parametrize("limit", [0, 5, 64, 65, 1000, 4096, 5000, 100_000])
def test_the_longest_fitting_length(limit: int) -> None:
    tried: list[int] = []

    def fits(tokens: int) -> bool:
        tried.append(tokens)
        return tokens <= limit

    assert longest(fits, 64, 8192, 16) == (8192 if limit >= 8192 else limit // 16 * 16)
    assert len(tried) <= 20
