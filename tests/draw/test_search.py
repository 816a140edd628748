from __future__ import annotations

from pathlib import Path

import pytest

from bytescale_ext.draw.search import draw_strategies, frontier
from tests.draw.png import png_size

FOUND = [(3.0, 10.0, "a"), (2.0, 20.0, "b"), (2.5, 30.0, "c"), (1.0, 40.0, "d"), (3.5, 10.0, "e")]


def test_the_frontier_gains_time_for_memory() -> None:
    assert [name for _, _, name in frontier(FOUND)] == ["a", "b", "d"]


def test_strategies_are_drawn(tmp_path: Path) -> None:
    draw_strategies(FOUND, [(5.0, 8.0)], tmp_path / "search.png", "strategies")
    assert png_size(tmp_path / "search.png") == (1105, 650)
    draw_strategies(FOUND[:1], [], tmp_path / "one.png", "one")
    assert png_size(tmp_path / "one.png") == (1105, 650)


def test_nothing_is_not_drawn(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no strategies"):
        draw_strategies([], [], tmp_path / "none.png", "none")
