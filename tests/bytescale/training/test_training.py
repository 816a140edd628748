"""Losses in our figures are means over a log interval, as in Megatron's log line."""

from __future__ import annotations

import torch

from megatron.bytescale.runtime import Totals
from megatron.bytescale.training.training import add_losses, mean_losses


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
