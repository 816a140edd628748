"""Table of features that were trained together, from the flags of runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.tested import BEGIN, COLUMNS, END, FILE, PAGE, ROWS, flags_of, main, note, table, with_table
from tests.e2e.training import CLASSIC_MODEL, HDP, MODEL, TRAIN

RUNS = [
    flags_of([*MODEL, *HDP, *words.split()])
    for words in (
        "--seq1f1b-slices 3 --pipeline-model-parallel-size 2 --swap-fraction 0.5",
        "--pipeline-model-parallel-size=2 --pipeline-model-parallel-layout Et|t|t|tL --num-experts 4",
        "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|tL --activation-policy none",
        "--tensor-model-parallel-size 1 --position-embedding-type yarn",
    )
]


def cell(row: str, column: str) -> str:
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table(RUNS).splitlines()]
    return next(line for line in lines if line[0] == row)[lines[0].index(column)]


def test_a_cell_counts_the_runs_that_have_both() -> None:
    assert cell("any model", "runs") == "4"
    assert cell("any model", "pipelines") == "3"
    assert cell("slices", "activation policy") == cell("activation policy", "slices") == "1"
    assert cell("virtual stages", "experts") == "1"
    assert cell("virtual stages", "pipelines") == "1"
    assert cell("YaRN, or scaled rope", "runs") == "1"
    assert cell("tensor parallelism", "runs") == ""
    assert cell("evaluation", "runs") == ""


def test_the_last_value_of_a_flag_counts() -> None:
    assert flags_of(["a.py", "--x", "1", "2", "--y", "--x", "-3"]) == {"--x": ("-3",), "--y": ()}


def test_runs_with_hybrid_data_parallelism_are_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FILE, raising=False)
    note([*MODEL, *HDP])
    monkeypatch.setenv(FILE, str(tmp_path / "runs"))
    for argv in ([*MODEL, *HDP, "--save", str(tmp_path)], MODEL, [*CLASSIC_MODEL, *TRAIN, *HDP]):
        note(argv)
    assert len((tmp_path / "runs").read_text().splitlines()) == 2
    assert str(tmp_path) not in (tmp_path / "runs").read_text()


def test_the_page_has_a_row_for_each_feature() -> None:
    """A complete test session writes the numbers, so they may be older than the tests."""
    page = PAGE.read_text()
    assert with_table(page, RUNS) == page.split(BEGIN)[0] + f"{BEGIN}\n{table(RUNS)}\n{END}" + page.split(END)[1]
    titles = [line.split("|")[1].strip() for line in page.splitlines() if line.startswith("| ")]
    assert titles[1:] == list(ROWS)
    assert set(COLUMNS) <= set(ROWS)


def test_features_that_no_run_had_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "page.md").write_text(f"a\n{BEGIN}\n{END}\nb\n")
    (tmp_path / "runs").write_text(json.dumps([*MODEL, *HDP, "--sft"]) + "\n")
    main([str(tmp_path / "runs")], tmp_path / "page.md")
    assert "| chats | 1 |" in (tmp_path / "page.md").read_text()
    printed = capsys.readouterr().out
    assert "1 runs" in printed
    assert "draft heads" in printed
    assert "chats" not in printed
