"""Decisions about documents that are equal to near-duplicates."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from bytescale_ext.data.clean.recipe import Recipe
from bytescale_ext.data.clean.settle import duplicates_path
from bytescale_ext.data.clean.shelf import decisions_path
from tests.data.cleaning import duplicates, folder_of, run_recipe, text, told


def test_copies_of_a_near_duplicate_have_its_representative(tmp_path: Path) -> None:
    longest, other = text(1) + " and more", text(1, changed=5)
    bodies = {"a.txt": other, "b.txt": longest, "c.txt": other, "d.txt": text(2), "e.txt": longest}
    recipe = Recipe((folder_of(tmp_path, "docs", bodies),), steps=("exact", "near"), tasks=3)
    run_recipe(recipe, tmp_path / "work")
    rows = {str(row["dropped"]): str(row["kept"]) for row in duplicates(tmp_path / "work")}
    assert len(rows) == 3
    (kept,) = set(rows.values())
    assert kept in ("docs/b.txt", "docs/e.txt")
    assert {"docs/a.txt", "docs/c.txt"} < rows.keys()
    decisions = np.concatenate([np.load(decisions_path(tmp_path / "work", task)) for task in range(3)])
    assert sorted(decisions["copies"].tolist()) == [0, 0, 0, 1, 4]
    counts = told(tmp_path / "work").counts["docs"]
    assert (counts["exact"], counts["near"]) == (1, 2)
    assert duplicates_path(tmp_path / "work", 2).exists()
