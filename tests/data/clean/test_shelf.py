"""Documents between stages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from datatrove.data import Document

from bytescale_ext.data.clean.shelf import (
    DECISION,
    ROW,
    Shelve,
    Survivors,
    decisions_path,
    hashes_of,
    rows_path,
    save_array,
    shelf_path,
    shelved,
)
from tests.data.cleaning import document, run_steps

SOURCES = ("docs", "code")


def test_documents_come_back_as_they_were(tmp_path: Path) -> None:
    made = [document("naïve\u2028 \ud800\n", "a"), document("x", "b", "code"), document("last", "c")]
    passed = run_steps([lambda *_: iter(made), Shelve(SOURCES, tmp_path)])
    assert passed == made
    assert [(number, values["text"], values["id"], values["source"]) for number, values in shelved(tmp_path, 0)] == [
        (0, "naïve\u2028 \ud800\n", "a", 0), (1, "x", "b", 1), (2, "last", "c", 0),
    ]  # fmt: skip
    rows = np.load(rows_path(tmp_path, 0))
    assert rows.dtype == ROW
    assert rows["length"].tolist() == [14, 1, 4]
    assert rows["source"].tolist() == [0, 1, 0]
    assert (int(rows["high"][1]), int(rows["low"][1])) == hashes_of("x")
    assert len(set(rows["name"].tolist())) == 3


def test_a_task_that_fails_leaves_no_shelf(tmp_path: Path) -> None:
    def failing(*_: object) -> Iterator[Document]:
        yield document("one")
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        run_steps([failing, Shelve(SOURCES, tmp_path)])
    assert not shelf_path(tmp_path, 0).exists()
    assert not rows_path(tmp_path, 0).exists()


def test_a_task_without_documents_has_an_empty_shelf(tmp_path: Path) -> None:
    run_steps([lambda *_: iter(()), Shelve(SOURCES, tmp_path)])
    assert list(shelved(tmp_path, 0)) == []
    assert len(np.load(rows_path(tmp_path, 0))) == 0


def test_survivors_are_those_that_stay(tmp_path: Path) -> None:
    made = [document(name, name, source) for name, source in (("a", "docs"), ("b", "code"), ("c", "docs"))]
    run_steps([lambda *_: iter(made), Shelve(SOURCES, tmp_path)])
    save_array(decisions_path(tmp_path, 0), np.array([(True, 2), (False, 0), (True, 1)], DECISION))
    found = run_steps([Survivors(SOURCES, tmp_path)])
    told = [(one.id, one.metadata["source"], one.metadata["copies"]) for one in found]  # type: ignore[attr-defined]
    assert told == [("a", "docs", 2), ("c", "docs", 1)]
