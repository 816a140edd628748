"""Palette, and writing of figures."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.colors import to_rgb

from bytescale_ext.draw.figure import Colour, hue_colour, ink_on, new_figure, save, tinted


def grey(colour: Colour) -> float:
    red, green, blue = colour
    return 0.30 * red + 0.59 * green + 0.11 * blue


def test_text_on_every_box_can_be_read() -> None:
    for number in range(200):
        for tint in (0.0, 0.5):
            colour = tinted(hue_colour(number, 0.5, 0.55), tint)
            assert abs(grey(colour) - grey(to_rgb(ink_on(colour)))) > 0.28


@pytest.mark.parametrize("name", ["none/picture.png", "picture.sheet"])
def test_a_picture_that_cannot_be_written_is_a_value_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=r"cannot write the picture .*picture"):
        save(new_figure(2.0, 2.0)[0], tmp_path / name)
