"""Loss curves and bars."""

from __future__ import annotations

from pathlib import Path

import pytest

from bytescale_ext.draw.charts import draw_bars, draw_dots, draw_loss, running_mean
from tests.draw.png import png_size


@pytest.mark.parametrize("num_steps", [1, 10, 200])
def test_loss_curves_are_drawn(tmp_path: Path, num_steps: int) -> None:
    draw_loss(range(num_steps), [3.0 / (step + 1) for step in range(num_steps)], tmp_path / "loss.png")
    assert png_size(tmp_path / "loss.png") == (1040, 585)


def test_each_step_needs_a_loss(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="0 steps and 0 losses"):
        draw_loss([], [], tmp_path / "none.png")
    with pytest.raises(ValueError, match="2 steps and 1 losses"):
        draw_loss([1, 2], [3.0], tmp_path / "none.png")


def test_a_running_mean_begins_with_the_values_there_are() -> None:
    assert running_mean([1.0, 3.0, 5.0, 7.0], 3) == [1.0, 2.0, 3.0, 5.0]


def test_more_bars_make_a_higher_picture(tmp_path: Path) -> None:
    heights = []
    for num_bars in (1, 6):
        bars = {f"scheduler {number}": (1.0 + number, 1.5 + number) for number in range(num_bars)}
        draw_bars(bars, tmp_path / "bars.png", "title", "time / bound")
        heights.append(png_size(tmp_path / "bars.png")[1])
    assert heights[0] < heights[1]
    with pytest.raises(ValueError, match="no bars"):
        draw_bars({}, tmp_path / "none.png", "title", "time / bound")


def test_more_rows_of_dots_make_a_higher_picture(tmp_path: Path) -> None:
    heights = []
    for num_rows in (1, 9):
        rows = {f"case {number}": [1.0, 2.0 + number, 0.5] for number in range(num_rows)}
        draw_dots(rows, ["ours", "static", "other"], tmp_path / "dots.png", ("title", "time / bound"))
        heights.append(png_size(tmp_path / "dots.png")[1])
    assert heights[0] < heights[1]
    with pytest.raises(ValueError, match="no rows"):
        draw_dots({}, ["ours"], tmp_path / "none.png", ("title", "time / bound"))
