"""The head of docs/results/simulated.md agrees with its tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.bench.plan.simulate_cases import CASES
from scripts.bench.plan.simulate_summary import FIGURES, draw_figures, read_figures, with_summary

PAGE = Path(__file__).resolve().parents[3] / "docs" / "results" / "simulated.md"
TEXT = PAGE.read_text()


def test_the_page_has_the_summary_of_its_tables() -> None:
    assert with_summary(TEXT) == TEXT, "run python scripts/bench/plan/simulate_table.py --only summary"
    assert TEXT.index("## Summary") < TEXT.index("## What the figures are") < TEXT.index("## Targets")


def test_figures_are_read_from_the_tables() -> None:
    changed = TEXT.replace("| ours | 1.006 (1.023)", "| ours | 7.000 (8.000)").replace(
        "| 12.42 (7.65) |", "| 3.21 (1) |"
    )
    assert [figures.case for figures in read_figures(changed)] == [case.name for case in CASES]
    last = read_figures(changed)[-1]
    assert last.over_bound[1, "ours"] == 7.0
    assert last.faster == {"static": 3.21, "megatron-hybrid": 1.56}
    assert "| github 2M, 512 ranks | 3.21 | 1.56 | 7.000 |" in with_summary(changed)
    (row,) = (line for line in TEXT.splitlines() if "github 2M, 512 ranks x 8" in line and "within 80 GB" in line)
    assert f"{last.chosen(8):.3f}" in row
    assert set(last.over_bound) >= {(stages, name) for stages in (1, 4, 8) for name in ("static", "ours")}


def test_a_page_without_tables_is_an_error() -> None:
    with pytest.raises(ValueError, match="no table"):
        read_figures("## Without pipelines")


@pytest.mark.full
@pytest.mark.slow
def test_pictures_are_drawn(tmp_path: Path) -> None:
    draw_figures(TEXT, tmp_path)
    for name in FIGURES:
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
