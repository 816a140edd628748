"""Documents between stages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from datatrove.data import Document

from bytescale_ext.data.clean.shelf import (
    ROW,
    Shelve,
    hashes_of,
    rows_path,
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
