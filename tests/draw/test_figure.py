"""The palette, and writing of figures."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest
from matplotlib.colors import to_rgb

from bytescale_ext.draw.figure import INK, LINES, Colour, hue_colour, ink_on, new_figure, save, tinted
from tests.draw.png import png_size


def grey(colour: Colour) -> float:
    red, green, blue = colour
    return 0.30 * red + 0.59 * green + 0.11 * blue


def test_text_on_every_box_can_be_read() -> None:
    for number in range(200):
        for tint in (0.0, 0.5):
            colour = tinted(hue_colour(number, 0.5, 0.55), tint)
            assert abs(grey(colour) - grey(to_rgb(ink_on(colour)))) > 0.28


def test_a_tint_is_lighter_in_grey() -> None:
    for number in range(50):
        colour = hue_colour(number, 0.5, 0.55)
        assert grey(tinted(colour, 0.5)) > grey(colour) + 0.1


def test_lines_differ_in_grey() -> None:
    """By their marker and dash."""
    assert all(one[1:3] != other[1:3] for one, other in combinations(LINES, 2))


def test_figures_have_one_look(tmp_path: Path) -> None:
    figure, axes = new_figure(6.0, 2.0, columns=2)
    assert len(axes) == 2
    for one in axes:
        assert [one.spines[side].get_visible() for side in ("top", "right", "left", "bottom")] == [False] * 3 + [True]
        assert one.xaxis.label.get_color() == INK
    save(figure, tmp_path / "two.png")
    assert png_size(tmp_path / "two.png") == (780, 260)


@pytest.mark.parametrize("name", ["none/picture.png", "picture.sheet"])
def test_a_picture_that_cannot_be_written_is_a_value_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=r"cannot write the picture .*picture"):
        save(new_figure(2.0, 2.0)[0], tmp_path / name)
