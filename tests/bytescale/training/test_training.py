"""Losses are means over a log interval, as in Megatron's log line; predicted and measured step times are compared."""

from __future__ import annotations

import pytest
import torch

from megatron.bytescale.runtime import LogState, Totals
from megatron.bytescale.training.training import add_losses, compare_times, mean_losses


def test_losses_are_means_over_the_interval() -> None:
    totals = Totals()
    assert mean_losses(totals) == {}
    for loss in (2.0, 4.0, 3.0):
        add_losses(totals, {"lm loss": torch.tensor(loss), "z loss": torch.tensor([loss / 2])}, is_skipped=False)
    assert mean_losses(totals) == {"lm loss": 3.0, "z loss": 1.5}


def test_skipped_steps_count_only_alone() -> None:
    totals, overflow = Totals(), {"lm loss": torch.tensor(float("inf"))}
    add_losses(totals, overflow, is_skipped=True)
    assert mean_losses(totals) == {"lm loss": float("inf")}
    add_losses(totals, {"lm loss": torch.tensor(4.0)}, is_skipped=False)
    add_losses(totals, overflow, is_skipped=True)
    assert mean_losses(totals) == {"lm loss": 4.0}


def test_predicted_times_learn_the_seconds_outside_of_passes() -> None:
    log = LogState()
    totals = Totals(num_steps=2, seconds=10.0, predicted_passes=7.0, predicted_update=1.0)
    assert compare_times(log, totals, pass_seconds=8.0) == pytest.approx(0.8), "the first update is forecast"
    assert compare_times(log, totals, pass_seconds=7.0) == pytest.approx(0.9), "the second is measured"
    assert compare_times(log, totals, pass_seconds=12.0) == pytest.approx(0.95)
    assert list(log.rests) == [1.0, 1.5, 0.0], "a clock that jumps gives no negative seconds"
    assert compare_times(log, Totals(num_steps=2, seconds=10.0), pass_seconds=8.0) == 0.0, (
        "a rank that predicts nothing"
    )
