"""docs/results/measured.md from results: its targets, tables and pictures."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.bench.cluster.cases import FULL
from scripts.bench.cluster.page import main, page, targets
from scripts.bench.cluster.results import Results
from tests.bench.cluster.samples import SETTING, results_of


@pytest.mark.slow
def test_the_page_has_a_table_of_each_case_and_its_pictures(tmp_path: Path) -> None:
    results_of(tmp_path / "results.json").write()
    output = tmp_path / "measured.md"
    assert main(["--results", str(tmp_path / "results.json"), "--output", str(output)]) == 0
    text = output.read_text()
    for case in ("byted 2x4 matched", "github 1x8 matched"):
        assert f"\n## {case}\n" in text
    assert "## byted 2x4 slow" not in text
    assert "| lengths, nodes x ranks, links | ours | over naive | over static | over hybrid |" in text
    assert "| byted 2x4 slow | 20 |  | 4.00 |  |" in text
    assert "| plain data parallelism with packing | refused: it does not fit |" in text
    assert "| static context parallelism over all ranks | 10 | 3.00x (3.00 to 3.00) |" in text
    assert "| ours | 3 | +5.0% | +5.0% (" in text
    for name in ("speed", "time", "bytes"):
        assert f"(measured/{name}.png)" in text
        assert (tmp_path / "measured" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_the_commands_of_the_page(tmp_path: Path) -> None:
    """Return results of some cases and of all cases, once and with a second round of the quick cases."""
    results, script = results_of(tmp_path / "results.json"), "speed.py"
    assert [line.partition(script)[2] for line in page(results).splitlines() if script in line] == [" --quick"]
    results.runs["byted 2x8 matched"] = results.runs["byted 2x4 slow"]
    lines = [line.partition(script)[2] for line in page(results).splitlines() if script in line]
    assert lines == [" --quick", ' --cases "byted 2x8 matched"']
    for planned in FULL:
        results.runs.setdefault(str(planned.case), results.runs["byted 2x4 slow"])
    assert [line.partition(script)[2] for line in page(results).splitlines() if script in line] == [""]
    results.runs["byted 2x4 matched"]["ours"] *= 2
    lines = [line.partition(script)[2] for line in page(results).splitlines() if script in line]
    assert lines == ["", ' --cases "byted 2x4 matched" --rounds 2']


def test_targets_are_met_or_missed(tmp_path: Path) -> None:
    rows = [line for line in page(results_of(tmp_path / "results.json")).splitlines() if " at least " in line]
    assert [row.split(" | ")[2:] for row in rows[:4]] == [
        ["1.5", "**missed** |"], ["1", "**missed** |"], ["1.5", "met |"], ["1", "met |"]
    ]  # fmt: skip


def test_targets_without_figures() -> None:
    assert [target.row.split(" | ")[-1] for target in targets({}, None)] == ["not measured |"] * 4


def test_no_results_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Results(tmp_path / "empty.json", SETTING).write()
    for path, message in ((tmp_path / "none.json", "holds no results"), (tmp_path / "empty.json", "holds no runs yet")):
        assert main(["--results", str(path), "--output", str(tmp_path / "page.md")]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "page.md").exists()
