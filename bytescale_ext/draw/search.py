"""Plot of search strategies: step time against device memory, with the Pareto frontier."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bytescale_ext.draw.figure import BLUE, DARK_BLUE, FRAME, INK, new_figure, save, set_grid, set_legend, set_title


def draw_strategies(
    replayed: Sequence[tuple[float, float, str]], bounds: Sequence[tuple[float, float]], path: Path, title: str
) -> None:
    """Draw a dot for each strategy, and a line through the Pareto frontier of step time and device memory.

    Args:
        replayed: (seconds of a step, GB of a device, name) of each strategy that was replayed to the end.
        bounds: lower bounds (seconds of a step, GB of a device) of each strategy whose replay was cut short.
        path: file to write.
        title: title of the picture.

    Raises:
        ValueError: no strategy was replayed to the end, or the file cannot be written.
    """
    if not replayed:
        raise ValueError("there are no strategies to draw")
    figure, (axes,) = new_figure(8.5, 5.0)
    if bounds:
        axes.plot([gb for _, gb in bounds], [seconds for seconds, _ in bounds], linestyle="none", marker=".",
                  color=FRAME, label="replay cut short: lower bound")  # fmt: skip
    axes.plot([gb for _, gb, _ in replayed], [seconds for seconds, _, _ in replayed], linestyle="none", marker="o",
              color=BLUE, markeredgecolor=INK, label="replayed")  # fmt: skip
    best = frontier(replayed)
    axes.plot([gb for _, gb, _ in best], [seconds for seconds, _, _ in best], color=DARK_BLUE, drawstyle="steps-post",
              label="frontier")  # fmt: skip
    seconds, gb, name = best[-1]
    axes.annotate(name, (gb, seconds), xytext=(0, -14), textcoords="offset points", fontsize=9, color=INK, ha="right")
    set_grid(axes)
    axes.set_ylim(bottom=0.0)
    axes.set_xlabel("device memory (GB)")
    axes.set_ylabel("time of a step (s)")
    set_legend(figure, axes, 3)
    set_title(axes, title)
    save(figure, path)


def frontier(strategies: Sequence[tuple[float, float, str]]) -> list[tuple[float, float, str]]:
    """Return the Pareto frontier of (seconds, GB, name) in ascending order of memory."""
    best: list[tuple[float, float, str]] = []
    for strategy in sorted(strategies, key=lambda strategy: (strategy[1], strategy[0])):
        if not best or strategy[0] < best[-1][0]:
            best.append(strategy)
    return best
