"""The picture of an n-gram memory's cache: hit rate against size, a line for each policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from bytescale_ext.draw.figure import GRID, draw_line, new_figure, save, set_title


def draw_hit_rates(lines: Mapping[str, Sequence[tuple[float, float]]], path: Path, title: str) -> None:
    """Draw lines of points (share of the touched rows that the cache holds, hit rate); the suffix names the format.

    Raises:
        ValueError: there is nothing to draw, or the file cannot be written.
    """
    if not any(lines.values()):
        raise ValueError("there are no hit rates to draw")
    figure, (axes,) = new_figure(7.0, 4.0)
    for number, (name, points) in enumerate(lines.items(), start=1):
        draw_line(axes, number, [(100 * size, 100 * rate) for size, rate in sorted(points)], name)
    axes.set_ylim(0, 100)
    axes.set_xlim(left=0)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_xlabel("rows in the cache of a worker, % of all rows touched")
    axes.set_ylabel("reads without a transfer, %")
    axes.legend(frameon=False, fontsize=9, loc="lower right")
    set_title(axes, title)
    save(figure, path)
