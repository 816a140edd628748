"""The settings of fine-tuning are found by their type."""

from __future__ import annotations

import dataclasses

import pytest

from bytescale_ext.config.answers import AnswerLossConfig
from tests.config.runs import run_of


def test_they_are_frozen_and_found() -> None:
    config = AnswerLossConfig(("a", "b"))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.prefixes = ()  # type: ignore[misc]
    run = run_of()
    assert run.find(AnswerLossConfig) is None
    assert run.with_feature("sft", config).get(AnswerLossConfig) is config
