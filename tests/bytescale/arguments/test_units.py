"""Quantities that count documents are named where users look."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from megatron.bytescale.arguments.units import UNITS, CountedFlags

GUIDE = Path(__file__).resolve().parents[3] / "docs" / "guide" / "training.md"


def test_each_flag_has_a_unit_and_stands_in_the_guide() -> None:
    flags = {f"--{field.name.replace('_', '-')}" for field in fields(CountedFlags)}
    assert flags == set(UNITS)
    section = GUIDE.read_text(encoding="utf-8").partition("## What counts documents")[2].partition("\n## ")[0]
    assert all(f"`{flag}`" in section for flag in flags)


def test_only_given_flags_are_named() -> None:
    values = dict.fromkeys((field.name for field in fields(CountedFlags)), None)
    counted = CountedFlags(**{**values, "train_samples": 8, "lr_warmup_samples": 0})  # type: ignore[arg-type]
    assert counted.given() == {"--train-samples": UNITS["--train-samples"]}
