"""Data sets that Megatron's flags name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron.bytescale.arguments.data import DataPaths

NOTHING = DataPaths(None, None, None, None, None, None)


@pytest.mark.ranks
def test_data_sets_of_all_splits() -> None:
    assert NOTHING.prefixes() == []
    assert replace(NOTHING, data_path=["0.3", "a", "0.7", "b"]).prefixes() == ["a", "b"]
    assert replace(NOTHING, train_data_path=["a"], test_data_path=["b"]).prefixes() == ["a", "b"]


@pytest.mark.ranks
def test_flags_that_megatron_refuses(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Megatron refuses these arguments: "):
        replace(NOTHING, data_args_path=str(tmp_path / "none")).prefixes()
