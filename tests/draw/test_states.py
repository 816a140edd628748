from __future__ import annotations

from pathlib import Path

import pytest

from bytescale_ext.draw.states import MOST_MOVES, draw_moves
from bytescale_ext.plan.states.pages import StateTensor, lay_out
from bytescale_ext.plan.states.timeline import Speeds, replay
from tests.draw.png import png_size


@pytest.mark.parametrize("num_pages", [1, 5, MOST_MOVES])
def test_moves_are_drawn(num_pages: int, tmp_path: Path) -> None:
    table = lay_out([StateTensor("a", 8 * num_pages, 0, True)], 32)
    draw_moves(replay(table, 2, Speeds(10.0, 30.0)), tmp_path / "moves.png", "one step")
    assert png_size(tmp_path / "moves.png") == (1560, 338)


def test_a_disk_has_lanes_of_its_own(tmp_path: Path) -> None:
    table = lay_out([StateTensor("a", 64, 0, True)], 32)
    draw_moves(replay(table, 2, Speeds(10.0, 30.0, 9.0, 6.0), {1, 3, 5}), tmp_path / "moves.png", "one step")
    assert png_size(tmp_path / "moves.png") == (1560, 468)


def test_nothing_is_not_drawn(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no moves to draw"):
        draw_moves((), tmp_path / "none.png", "none")
