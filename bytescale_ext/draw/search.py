"""A picture of strategies: time of a step against device memory, the frontier marked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bytescale_ext.draw.figure import BLUE, DARK_BLUE, FRAME, GRID, INK, new_figure, save, set_title


def draw_strategies(
    found: Sequence[tuple[float, float, str]], bounded: Sequence[tuple[float, float]], path: Path, title: str
) -> None:
    """Draw a dot for each strategy, and a line through those that no other one beats in both time and memory.

    Args:
        found: (seconds of a step, GB of a device, name) of strategies that were replayed to the end.
        bounded: (seconds, GB) that strategies take at least, which were not.
        path: file to write.
        title: title of the picture.

    Raises:
        ValueError: nothing was found, or the file cannot be written.
    """
    if not found:
        raise ValueError("there are no strategies to draw")
    figure, (axes,) = new_figure(8.5, 5.0)
    if bounded:
        axes.plot([gb for _, gb in bounded], [seconds for seconds, _ in bounded], linestyle="none", marker=".",
                  color=FRAME, label="not replayed to the end: at least")  # fmt: skip
    axes.plot([gb for _, gb, _ in found], [seconds for seconds, _, _ in found], linestyle="none", marker="o",
              color=BLUE, markeredgecolor=INK, label="replayed")  # fmt: skip
    best = frontier(found)
    axes.plot([gb for _, gb, _ in best], [seconds for seconds, _, _ in best], color=DARK_BLUE, drawstyle="steps-post",
              label="frontier")  # fmt: skip
    seconds, gb, name = best[-1]
    axes.annotate(name, (gb, seconds), xytext=(0, -14), textcoords="offset points", fontsize=9, color=INK, ha="right")
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_ylim(bottom=0.0)
    axes.set_xlabel("device memory, GB")
    axes.set_ylabel("seconds of a step")
    axes.legend(frameon=False, fontsize=9)
    set_title(axes, title)
    save(figure, path)


def frontier(found: Sequence[tuple[float, float, str]]) -> list[tuple[float, float, str]]:
    """Return the strategies of which no other one is at least as good in both, by memory."""
    best: list[tuple[float, float, str]] = []
    for one in sorted(found, key=lambda one: (one[1], one[0])):
        if not best or one[0] < best[-1][0]:
            best.append(one)
    return best
