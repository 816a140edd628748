"""Figure set-up and colour palette shared by all pictures.

The hue of a box follows from the number of its sequence or micro-batch. Forward and backward differ in lightness, and
lines differ in marker and dash, so pictures stay readable in greyscale. A way to train that is compared with others (an
arm) has the same colour and marker in all pictures. Functions import matplotlib when they draw.
"""

from __future__ import annotations

import colorsys
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from bytescale_ext.new_file import new_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Colour = tuple[float, float, float]

INK: Final = "#333333"
FRAME: Final = "#999999"
GRID: Final = "#e6e6e6"
IDLE: Final = "#f7f7f7"
PADDING: Final = (0.8, 0.8, 0.8)
BLUE: Final = "#4c78a8"
DARK_BLUE: Final = "#1f3f66"
GREYS: Final = {"wait": (0.90, 0.90, 0.90), "reduce": (0.66, 0.66, 0.66), "optimizer": (0.42, 0.42, 0.42)}


@dataclass(frozen=True)
class Style:
    """Colour, marker and dash of a line, of dots, or of bars (the colour alone)."""

    colour: str
    marker: str
    dash: str = "-"


_ARMS: Final = {
    "ours": Style("#1f5fbf", "o"),
    "plain": Style("#8ab6e8", "p", "--"),
    "bytescale": Style("#2a9d8f", "^"),
    "naive": Style("#8c6bb1", "v", ":"),
    "hybrid": Style("#e08214", "D"),
    "dynamic": Style("#e377a2", "d", "-."),
    "static": Style("#b2182b", "s"),
    "packed": Style("#7f7f7f", "P", "--"),
    "pipelines": Style("#d4a72c", "X", "--"),
    "slices": Style("#3f8f3f", "<"),
    "eager": Style("#9bcf6a", ">", ":"),
}
ARMS: Final = _ARMS | {"megatron-hybrid": _ARMS["hybrid"]}
"""Style of each arm, by its name in the benches and planners. *pipelines* are pipelines with 1F1B."""
TIMES: Final = {
    "computing": "#3a83c6",
    "exchange": "#a9c43a",
    "sending": "#a9c43a",
    "stage": "#5b9e6f",
    "reduction": "#c77f3a",
    "launch": "#8c6bb1",
    "other": "#999999",
    "waiting": "#e0e0e0",
}
"""Colour of each kind of time. Sending is the part of an exchange that processors of the emulated cluster do."""
SERIES: Final = (
    Style("#1f5fbf", "o"),
    Style("#e08214", "s", "--"),
    Style("#2a9d8f", "^", "-."),
    Style("#7b3294", "D", ":"),
    Style("#1a1a1a", "x", "--"),
)
"""Styles of lines that are no arms, by their order in a picture."""
_GOLDEN: Final = 0.6180339887498949  # golden ratio: hues this far apart keep consecutive numbers distinguishable


def new_figure(
    width: float, height: float, columns: int = 1, heights: Sequence[float] = (1.0,)
) -> tuple[Figure, list[Axes]]:
    """Return a figure and its axes in row-major order. The figure has its own canvas; pyplot and a display are unused.

    Args:
        width, height: size of the figure in inches.
        columns: number of columns of axes.
        heights: relative height of each row of axes.
    """
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it quotes a file of settings in the current folder
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    matplotlib.rcdefaults()  # such a file could start LaTeX
    figure = Figure(figsize=(width, height), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(len(heights), columns, height_ratios=heights)
    axes = [figure.add_subplot(grid[row, column]) for row in range(len(heights)) for column in range(columns)]
    for panel in axes:
        for side in ("top", "right", "left"):
            panel.spines[side].set_visible(False)
        panel.spines["bottom"].set_color(FRAME)
        panel.tick_params(colors=INK, labelsize=9)
        panel.xaxis.label.set_color(INK)
        panel.yaxis.label.set_color(INK)
    return figure, axes


def draw_line(axes: Axes, style: Style, points: Sequence[tuple[float, float]], label: str) -> None:
    """Draw a line through the points (x, y)."""
    x, y = [x for x, _ in points], [y for _, y in points]
    axes.plot(
        x, y, color=style.colour, marker=style.marker, markersize=5, linestyle=style.dash, linewidth=1.8, label=label
    )


def set_grid(axes: Axes, axis: Literal["both", "x", "y"] = "both") -> None:
    """Draw grid lines below the data."""
    axes.grid(axis=axis, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)


def set_title(axes: Axes, title: str) -> None:
    """Set a title that is aligned with the left end of the axes."""
    axes.set_title(title, loc="left", fontsize=11, color=INK, pad=10)


def set_legend(figure: Figure, axes: Axes, columns: int) -> None:
    """Put the legend of one panel below all panels, where it covers neither data nor titles."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, fontsize=9, labelcolor=INK, loc="outside lower center", ncols=columns,
                  handlelength=3.0)  # fmt: skip


def set_rows(axes: Axes, numbers: range, name: str) -> None:
    """Label the rows of boxes ``name 0``, ``name 1`` and so on, without tick marks."""
    axes.set_yticks(numbers, [f"{name} {number}" for number in numbers])
    axes.tick_params(axis="y", length=0)


def name_rows(axes: Axes, names: Sequence[str]) -> None:
    """Put a row for each name from top to bottom, 1 apart, with the name in place of a tick mark."""
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(names) - 0.5, -0.5)


def draw_times(axes: Axes, row: int, times: Mapping[str, float]) -> float:
    """Draw a bar of a row in parts, one for each kind of time in ``TIMES``, and return its end.

    The kinds of row 0 are in the legend.
    """
    end = 0.0
    for kind in (kind for kind in TIMES if kind in times):
        axes.barh(row, times[kind], left=end, height=0.7, color=TIMES[kind], label=None if row else kind)
        end += times[kind]
    return end


def count_text(count: int) -> str:
    """Return a count with a binary suffix, K for 1024 and M for 1024**2, as in names of context lengths."""
    for size, name in ((1 << 20, "M"), (1 << 10, "K")):
        if count >= size:
            return f"{count / size:.3g}{name}"
    return str(count)


def save(figure: Figure, path: Path) -> None:
    """Write a figure in the format of the path's suffix. Raises ValueError if the file cannot be written."""
    try:
        with new_file(path, is_binary=True) as file:
            figure.savefig(file, format=path.suffix.removeprefix("."))
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot write the picture {path}: {error}") from error


def hue_colour(number: int, lightness: float, saturation: float) -> Colour:
    """Return the colour of a sequence or micro-batch, whose number sets the hue."""
    return colorsys.hls_to_rgb((0.58 + number * _GOLDEN) % 1.0, lightness, saturation)


def tinted(colour: Colour, share: float) -> Colour:
    """Return a colour mixed with white; ``share`` is the fraction of white."""
    red, green, blue = colour
    return (red + (1 - red) * share, green + (1 - green) * share, blue + (1 - blue) * share)


def ink_on(colour: Colour) -> str:
    """Return a text colour that is readable on the background ``colour``."""
    red, green, blue = colour
    return "white" if 0.30 * red + 0.59 * green + 0.11 * blue < 0.5 else INK
