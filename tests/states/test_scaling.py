"""Scaling of rows of a weight, and of float32 copies in pages."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bytescale_ext.states.scaling import RowFactors
from tests.states.test_adam import Paged, Resident, assert_equal, in_order
from tests.states.test_tiered import Tiered, saved

ROWS = RowFactors(torch.tensor([2.0, 3.0, 5.0]), 4)


@pytest.mark.parametrize("start", range(12))
def test_any_part_of_a_weight(start: int) -> None:
    whole = torch.arange(12.0).view(3, 4) * ROWS.factors[:, None]
    for stop in range(start, 13):
        part = torch.arange(12.0)[start:stop].clone()
        ROWS.scale_(part, start)
        assert torch.equal(part, whole.flatten()[start:stop])


def clip(run: Resident) -> None:
    """Scale the copy and the model's parameter of the third weight; the copy is a shard that begins inside of a row."""
    weight = run.model[2].view(-1)
    rows = RowFactors(torch.linspace(0.2, 1.0, 1 + weight.numel() // 9), 9)
    rows.scale_(weight, 5)
    if isinstance(run, Paged):
        run.adam.scale_copy(run.main[2], rows, 5)
    elif run.main[2] is not run.model[2]:
        rows.scale_(run.main[2].view(-1), 5)


def test_copies_in_pages_are_scaled() -> None:
    paged, resident = Paged(torch.bfloat16), Resident(torch.bfloat16)
    assert in_order(paged.main)
    for number in range(3):
        for run in (paged, resident):
            run.step(number)
            clip(run)
        assert_equal(paged, resident)


@pytest.mark.parametrize("saves", [False, True])
def test_copies_on_a_disk_are_scaled(saves: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are scaled at the next update, or when a save reads them; also if a save read them before."""
    monkeypatch.setattr("tests.states.test_adam.SHAPES", ((50, 30), (1,), (400, 70), (20, 20), (9,), (3300,)))
    tiered, resident = Tiered(torch.bfloat16, tmp_path, 3), Resident(torch.bfloat16)
    for number in range(6):
        for run in (tiered, resident):
            run.step(number)
            if saves and number == 3 and isinstance(run, Tiered):
                saved(run)
            clip(run)
            clip(run)
        if saves:
            assert_equal(saved(tiered), resident)
    assert_equal(saved(tiered), resident)
