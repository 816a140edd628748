"""Configuration of windows: their tables, and lengths drawn from them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bytescale_ext.config.sculpt import SculptConfig
from bytescale_ext.data.corpus.windows_file import WindowsHeader, save_windows
from bytescale_ext.plan.sculpt.pieces import ROW

ROWS = [(0, 0, 0, 4), (0, 3, 0, 3), (1, 1, 0, 5), (2, 1, 5, 2), (2, 4, 0, 6)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_windows(tmp_path / "a.windows.npy", np.array(ROWS, dtype=ROW), WindowsHeader(8, "split", 1, "x"))
    return tmp_path / "a.windows.npy"


def test_tables_by_data_set(path: Path) -> None:
    assert SculptConfig({"p": path}, "window").tables()["p"].tolist() == ROWS


def test_lengths_of_drawn_windows(path: Path) -> None:
    assert sorted(SculptConfig({"p": path}, "window").drawn(3, 0)) == [5, 7, 8]
    assert sorted(SculptConfig({"p": path}, "document").drawn(3, 0)) == [2, 3, 4, 5, 6]
    assert len(SculptConfig({"p": path, "q": path}, "window").drawn(6, 0)) == 6
    assert len(SculptConfig({"p": path}, "window").drawn(10, 0)) == 10
