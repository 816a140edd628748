"""Report of a corpus."""

from __future__ import annotations

from pathlib import Path

import pytest

from bytescale_ext.data.clean.output import DataSet
from bytescale_ext.data.clean.recipe import Recipe
from bytescale_ext.data.clean.report import load_report, make_report, save_report, text_of
from bytescale_ext.data.clean.tally import Tally
from tests.data.cleaning import folder_of


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return Recipe((folder_of(tmp_path, "docs", {"a.txt": "a"}), folder_of(tmp_path, "code", {"a.py": "b"})))


def told(work: Path) -> None:
    tally = Tally()
    tally.add("docs", "read", 10, 1000)
    tally.add("docs", "filter fineweb: list_ratio", 2, 200)
    tally.add("docs", "exact", 1, 100)
    tally.add("docs", "near", 3, 300)
    tally.add("docs", "broken", 5)
    tally.add("docs", "sentences", 2, 40)
    tally.add("docs", "masked")
    tally.add("docs", "kept", 4, 360)
    tally.add("docs", "weight 1.00", 3)
    tally.add("docs", "weight 2.00", 1)
    tally.example("near", "d/1", "a text", kept="d/0", jaccard=0.9)
    tally.save(work / "tallies" / "a.json")


def test_the_figures_of_each_source(recipe: Recipe, tmp_path: Path) -> None:
    told(tmp_path / "work")
    sets = [DataSet("docs", "docs", 1.0, (tmp_path / "docs" / "00000.jsonl",))]
    report = make_report(recipe, tmp_path / "work", sets, {"docs": "out/docs"})
    docs = report.sources["docs"]
    assert (docs.read, docs.read_bytes, docs.kept, docs.kept_bytes) == (10, 1000, 4, 360)
    assert docs.filtered == {"fineweb: list_ratio": 2}
    assert docs.bad == {"broken": 5}
    assert (docs.exact, docs.near, docs.masked, docs.sentences, docs.sentence_bytes) == (1, 3, 1, 2, 40)
    assert docs.duplication == pytest.approx(4 / 8)
    assert docs.quality == pytest.approx(0.8)
    assert docs.weight == 5.0
    assert (report.sources["code"].read, report.sources["code"].quality, report.sources["code"].duplication) == (
        0,
        0,
        0,
    )
    assert report.data_sets[0]["prefix"] == "out/docs"
    path = tmp_path / "report.json"
    save_report(path, report)
    assert load_report(path).sources == report.sources
    text = text_of(report)
    assert "docs                   10         2       1       3        4             360    36.0%" in text
    assert "docs: 5 broken, 2 fineweb: list_ratio, 1 masked, 2 lost 40 bytes of repeated sentences" in text
    assert "for example near: d/1 (kept d/0, 0.9): a text" in text
    assert "docs, weight 1: out/docs" in text


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"sources": {"a": {"read": 1}}}', '{"sources": {}, "more": 1}'])
def test_other_files_are_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(content)
    with pytest.raises(ValueError, match=r"report\.json: not a report of bytescale data clean"):
        load_report(tmp_path / "report.json")
