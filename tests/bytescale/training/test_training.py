"""Losses in our figures are the means that Megatron's log line prints."""

from __future__ import annotations

import pytest
import torch

from megatron.bytescale.training.training import mean_losses


def test_losses_are_means_over_the_interval() -> None:
    sums = {"lm loss": torch.tensor([6.0]), "advanced iterations": 2, "skipped iterations": 1, "nan iterations": 0}
    found = mean_losses(sums, {"lm loss": torch.tensor(3.0)}, is_skipped=False)
    assert {name: float(value) for name, value in found.items()} == {"lm loss": 3.0}


def test_first_step_of_an_interval_is_its_own_mean() -> None:
    found = mean_losses({}, {"lm loss": torch.tensor(2.5), "z loss": torch.tensor(0.5)}, is_skipped=False)
    assert {name: float(value) for name, value in found.items()} == {"lm loss": 2.5, "z loss": 0.5}


def test_skipped_step_does_not_count() -> None:
    sums = {"lm loss": torch.tensor([4.0]), "advanced iterations": 1}
    found = mean_losses(sums, {"lm loss": torch.tensor(float("inf"))}, is_skipped=True)
    assert float(found["lm loss"]) == pytest.approx(4.0)
