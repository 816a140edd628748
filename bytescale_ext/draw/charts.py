"""Simple charts: a loss curve, and bars of schedulers compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bytescale_ext.draw.figure import BLUE, DARK_BLUE, GRID, INK, LINES, new_figure, save, set_title


@dataclass(frozen=True)
class Series:
    """Losses of the steps of a run, and what the run is called in a legend."""

    name: str
    steps: Sequence[int]
    losses: Sequence[float]


def draw_loss(
    steps: Sequence[int], losses: Sequence[float], path: Path, title: str = "loss", beside: Series | None = None
) -> None:
    """Draw a loss curve: every step thin, and a running mean over it once there are 50 steps.

    Args:
        steps, losses: of the curve.
        path: file to write.
        title: title of the picture.
        beside: another run on the same steps, drawn as marks.

    Raises:
        ValueError: there are no steps, or the number of losses differs.
    """
    if not steps or len(steps) != len(losses):
        raise ValueError(f"a loss curve needs one loss for each step; got {len(steps)} steps and {len(losses)} losses")
    figure, (axes,) = new_figure(8.0, 4.5)
    smooth = len(steps) >= 50
    axes.plot(steps, losses, color=BLUE, linewidth=0.8 if smooth else 1.6, alpha=0.45 if smooth else 1.0)
    if smooth:
        window = max(5, len(steps) // 50)
        means = running_mean(losses, window)
        axes.plot(steps, means, color=DARK_BLUE, linewidth=1.8, label=f"mean of {window} steps")
    if beside is not None:
        axes.plot(beside.steps, beside.losses, linestyle="none", marker="o", markersize=9, markerfacecolor="none",
                  markeredgecolor=INK, label=beside.name)  # fmt: skip
    if smooth or beside is not None:
        axes.legend(frameon=False, fontsize=9)
    axes.annotate(
        f"{losses[-1]:.3f}", (steps[-1], losses[-1]), xytext=(5, 0), textcoords="offset points", va="center", fontsize=9
    )
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_xlabel("step")
    axes.set_ylabel("loss per token")
    axes.margins(x=0.02)
    set_title(axes, title)
    save(figure, path)


def draw_bars(bars: dict[str, tuple[float, float]], path: Path, title: str, xlabel: str) -> None:
    """Draw a bar for each name: its mean, and a mark at its worst value.

    Args:
        bars: (mean, worst) by name, top to bottom.
        path: file to write.
        title: title of the picture.
        xlabel: what is measured.

    Raises:
        ValueError: there is nothing to draw.
    """
    if not bars:
        raise ValueError("there are no bars to draw")
    figure, (axes,) = new_figure(8.0, 1.4 + 0.5 * len(bars))
    rows = range(len(bars))
    means, worsts = zip(*bars.values(), strict=True)
    axes.barh(rows, means, height=0.62, color=BLUE, label="mean")
    axes.plot(worsts, rows, linestyle="none", marker="|", markersize=18, markeredgewidth=2, color=INK, label="worst")
    for row, (mean, worst) in enumerate(bars.values()):
        place = (max(mean, worst), row)
        text = f"{mean:.3g}"
        axes.annotate(text, place, xytext=(6, 0), textcoords="offset points", va="center", fontsize=9, color=INK)
    axes.set_yticks(rows, list(bars))
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.margins(x=0.1)
    axes.set_xlabel(xlabel)
    axes.legend(frameon=False, fontsize=9, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2)
    set_title(axes, title)
    save(figure, path)


def draw_dots(rows: dict[str, list[float]], names: Sequence[str], path: Path, words: tuple[str, str]) -> None:
    """Draw a row of dots for each case on a logarithmic axis: a dot for each of ``names``, in its own marker.

    Args:
        rows: values by case, top to bottom; each has one value for each name.
        names: what the dots of a row are.
        path: file to write.
        words: (title, label of the axis).

    Raises:
        ValueError: there is nothing to draw.
    """
    from matplotlib.ticker import FuncFormatter, NullFormatter

    if not rows:
        raise ValueError("there are no rows to draw")
    figure, (axes,) = new_figure(8.5, 1.4 + 0.36 * len(rows))
    for number, name in enumerate(names):
        colour, marker, _, _ = LINES[number % len(LINES)]
        of_rows = [row[number] for row in rows.values()]
        axes.plot(of_rows, range(len(rows)), linestyle="none", marker=marker, markersize=7, markeredgecolor=INK,
                  color=colour, label=name, zorder=3 + number)  # fmt: skip
    axes.axvline(1.0, color=INK, linewidth=0.8, linestyle="--")
    axes.set_xscale("log")
    values = [value for row in rows.values() for value in row]
    ticks = (0.5, 1, 1.5, 2, 3, 5, 8, 12, 20)
    axes.set_xticks([tick for tick in ticks if min(values) <= 1.3 * tick and tick <= 1.3 * max(values)])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_yticks(range(len(rows)), list(rows))
    axes.invert_yaxis()
    axes.grid(axis="both", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(axis="y", length=0)
    set_title(axes, words[0])
    axes.set_xlabel(words[1])
    figure.legend(frameon=False, fontsize=9, loc="outside lower center", ncols=len(names))
    save(figure, path)


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """Return the mean of the last ``window`` values at each position (of fewer at the beginning)."""
    parts = (values[max(0, stop - window) : stop] for stop in range(1, len(values) + 1))
    return [sum(part) / len(part) for part in parts]
