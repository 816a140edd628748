"""Results of the bench on a cluster: written after each run, read again, never mixed with another setting."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.bench.cluster.results import Results
from tests.bench.cluster.samples import COST, SETTING, results_of, run_of


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "new" / "results.json"
    first = Results.open(path, SETTING)
    first.cost = COST
    first.add("byted 1x8 matched", "ours", run_of([1.0, 2.0], predicted=3.0))
    first.add("byted 1x8 matched", "ours", run_of([1.0, 4.0]))
    first.add("byted 1x8 matched", "packed", "it does not fit")
    again = Results.open(path, SETTING)
    assert (again.runs, again.cost, again.setting) == (first.runs, COST, SETTING)
    assert len(again.of("byted 1x8 matched", "ours")) == 2
    assert again.of("byted 1x8 matched", "packed") == again.of("another", "ours") == []
    assert [path.name for path in path.parent.iterdir()] == ["results.json"]


def test_cases_hold_the_arms_that_ran(tmp_path: Path) -> None:
    results = results_of(tmp_path / "results.json")
    assert list(results.cases(["byted 2x4 matched"])["byted 2x4 matched"]) == ["ours", "naive", "static", "hybrid"]
    assert results.refused("byted 2x4 matched") == {"packed": "it does not fit"}
    assert len(results.cases()) == 3


def test_another_setting_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    Results(path, SETTING).write()
    with pytest.raises(ValueError, match="has another setting"):
        Results.open(path, {**SETTING, "seed": 1})


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"runs": 3}'])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "results.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="holds no results"):
        Results.read(path)
