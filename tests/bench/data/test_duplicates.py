"""The bench of duplicates: its exact join against all pairs, and its figures on texts with known copies."""

from __future__ import annotations

import json
import sys
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bytescale_ext.data.clean.words import jaccard
from scripts.bench.data import duplicates
from tests.data.cleaning import text


@given(st.lists(st.sets(st.integers(0, 12), min_size=1), max_size=8), st.sampled_from([0.5, 0.8, 0.9, 1.0]))
def test_the_join_finds_all_pairs(sets: list[set[int]], least: float) -> None:
    arrays = [np.array(sorted(members), np.uint64) for members in sets]
    shares = {(i, j): jaccard(arrays[i], arrays[j]) for i, j in combinations(range(len(arrays)), 2)}
    expected = {pair: share for pair, share in shares.items() if share >= least}
    assert duplicates.true_pairs(arrays, least) == expected


def packages(folder: Path) -> Path:
    """Write three packages: two versions of a manual, and a package of web pages."""
    for version, changed in (("6.1_1", None), ("6.1_2", 70)):
        root = folder / f"linux-doc-{version}" / "usr"
        root.mkdir(parents=True)
        for number in range(12):
            body = text(number, 150, changed if number % 3 == 0 else None)
            (root / f"{number}.rst.txt").write_text(body)
        (root / "short.rst.txt").write_text("too short")
    web = folder / "gimp-help-en_2"
    web.mkdir()
    page = "<html><script>left out</script><p>" + text(50, 150).replace(" ", "&nbsp;", 1) + "</p></html>"
    (web / "a.html").write_text(page)
    (folder / "other_1").mkdir()
    return folder


def test_texts_of_packages(tmp_path: Path) -> None:
    folders = duplicates.packages_of(packages(tmp_path))
    assert [path.name for path in folders] == ["gimp-help-en_2", "linux-doc-6.1_1", "linux-doc-6.1_2"]
    assert [len(duplicates.texts_of(path, 100)) for path in folders] == [1, 12, 12]
    assert len(duplicates.texts_of(folders[1], 5)) == 5
    (page,) = duplicates.texts_of(folders[0], 100)
    assert "left out" not in page
    assert "<" not in page
    assert "\xa0" in page


@pytest.mark.full
def test_the_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["duplicates.py", "--debian", str(packages(tmp_path)), "--json"])
    assert duplicates.main() == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["documents"], figures["distinct"]) == (25, 17)
    assert figures["true_pairs"]["0.8"] == 4  # the changed texts
    assert figures["recall"]["0.8"] == 1.0
    assert figures["precision"] == 1.0
    assert figures["kept"] == 13
    assert figures["same_in_any_order"]
    assert figures["headers_left"] == 1
    assert figures["documents_per_second"] > 0
    for name in ("true_pairs", "recall"):
        figures[name] = {float(level): value for level, value in figures[name].items()}
    lines = duplicates.text_of(duplicates.Bench(**figures)).splitlines()
    assert "17 distinct, 13 kept" in lines[0]
    assert lines[3] == "similarity 0.8: 4 pairs by the exact join, recall 1.0000"
    assert lines[5] == "planted headers left: 1"


def test_without_packages_the_message_names_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["duplicates.py", "--debian", str(tmp_path / "none")])
    assert duplicates.main() == 0
    assert "skipped: " in capsys.readouterr().err
