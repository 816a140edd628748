"""Data sets that Megatron's flags name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron.bytescale.arguments.data import DataPaths, mean_tokens
from tests.data.sources import write_data_set

NOTHING = DataPaths(None, None, None, None, None, None)


@pytest.mark.ranks
def test_data_sets_of_all_splits() -> None:
    assert NOTHING.prefixes() == []
    assert replace(NOTHING, data_path=["0.3", "a", "0.7", "b"]).prefixes() == ["a", "b"]
    assert replace(NOTHING, train_data_path=["a"], test_data_path=["b"]).prefixes() == ["a", "b"]


@pytest.mark.parametrize(
    ("lengths", "are_cut", "expected"),
    [
        ([20, 20], False, 20.0),
        ([250], False, 250 / 3),  # samples of 100, 100 and 50 tokens
        ([250, 10], True, 55.0),  # the end is cut off
        ([0, 30], False, 30.0),  # an empty document gives no sample
    ],
)
def test_tokens_of_the_mean_sample(lengths: list[int], are_cut: bool, expected: float, tmp_path: Path) -> None:
    prefix = write_data_set(tmp_path / "a", [[[1] * length] for length in lengths])
    assert mean_tokens(prefix, 100, are_cut, None) == pytest.approx(expected)


def test_a_data_set_without_tokens_has_no_mean_sample(tmp_path: Path) -> None:
    prefix = write_data_set(tmp_path / "a", [[[]]])
    with pytest.raises(ValueError, match="holds no tokens"):
        mean_tokens(prefix, 100, False, None)


@pytest.mark.ranks
def test_flags_that_megatron_refuses(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Megatron refuses these arguments: "):
        replace(NOTHING, data_args_path=str(tmp_path / "none")).prefixes()
