"""Simple charts: loss curves, bars, dots, hit rates of caches and loads of experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

from bytescale_ext.draw.figure import (
    ARMS,
    BLUE,
    DARK_BLUE,
    INK,
    SERIES,
    draw_line,
    new_figure,
    save,
    set_grid,
    set_legend,
    set_title,
)
from bytescale_ext.plan.experts.placement import Floats, Ints

_MOST_POINTS = 60  # points of each line of balance ratios


@dataclass(frozen=True)
class Series:
    """Losses of a run by step, and the name of the run in the legend."""

    name: str
    steps: Sequence[int]
    losses: Sequence[float]


def draw_loss(
    steps: Sequence[int], losses: Sequence[float], path: Path, title: str = "loss", reference: Series | None = None
) -> None:
    """Plot the loss of each step as a thin line and, from 50 steps on, a running mean above it.

    Args:
        steps: numbers of the steps.
        losses: loss of each step.
        path: file to write.
        title: title of the picture.
        reference: another run over the same steps, drawn as circles.

    Raises:
        ValueError: there are no steps, the number of losses differs, or the file cannot be written.
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
    if reference is not None:
        axes.plot(reference.steps, reference.losses, linestyle="none", marker="o", markersize=9, markerfacecolor="none",
                  markeredgecolor=INK, label=reference.name)  # fmt: skip
    if smooth or reference is not None:
        axes.legend(frameon=False, fontsize=9)
    axes.annotate(
        f"{losses[-1]:.3f}", (steps[-1], losses[-1]), xytext=(5, 0), textcoords="offset points", va="center", fontsize=9
    )
    set_grid(axes, "y")
    axes.set_xlabel("step")
    axes.set_ylabel("loss per token")
    axes.margins(x=0.02)
    set_title(axes, title)
    save(figure, path)


def draw_bars(bars: dict[str, tuple[float, float]], path: Path, title: str, xlabel: str) -> None:
    """Draw a horizontal bar for each mean, with a mark at the worst value. Bars of arms have the arms' colours.

    Args:
        bars: (mean, worst value) by name, from top to bottom.
        path: file to write.
        title: title of the picture.
        xlabel: label of the horizontal axis.

    Raises:
        ValueError: ``bars`` is empty, or the file cannot be written.
    """
    if not bars:
        raise ValueError("there are no bars to draw")
    figure, (axes,) = new_figure(8.0, 1.8 + 0.5 * len(bars))
    rows = range(len(bars))
    means, worsts = zip(*bars.values(), strict=True)
    colours = [ARMS[name].colour if name in ARMS else BLUE for name in bars]
    axes.barh(rows, means, height=0.62, color=colours)
    axes.plot(worsts, rows, linestyle="none", marker="|", markersize=18, markeredgewidth=2, color=INK)
    for row, (mean, worst) in enumerate(bars.values()):
        text = f"{mean:.2f}, worst {worst:.2f}"
        place = (max(mean, worst), row)
        axes.annotate(text, place, xytext=(6, 0), textcoords="offset points", va="center", fontsize=9, color=INK)
    axes.set_yticks(rows, list(bars))
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.margins(x=0.2)
    axes.set_xlabel(xlabel)
    set_title(axes, title)
    save(figure, path)


def draw_dots(rows: dict[str, list[float]], names: Mapping[str, str], path: Path, title: str, xlabel: str) -> None:
    """Draw a row of dots on a logarithmic axis for each case; each arm has its own colour and marker.

    Args:
        rows: values by case, from top to bottom; each case has one value per name.
        names: arm (a key of ``figure.ARMS``) of each value of a row, by its name in the legend.
        path: file to write.
        title: title of the picture.
        xlabel: label of the horizontal axis.

    Raises:
        ValueError: ``rows`` is empty, or the file cannot be written.
    """
    from matplotlib.ticker import FuncFormatter, NullFormatter

    if not rows:
        raise ValueError("there are no rows to draw")
    figure, (axes,) = new_figure(8.5, 1.6 + 0.36 * len(rows))
    for number, (name, arm) in enumerate(names.items()):
        series = [row[number] for row in rows.values()]
        axes.plot(series, range(len(rows)), linestyle="none", marker=ARMS[arm].marker, markersize=7,
                  markeredgecolor=INK, color=ARMS[arm].colour, label=name, zorder=3 + number)  # fmt: skip
    axes.axvline(1.0, color=INK, linewidth=0.8, linestyle="--")
    axes.set_xscale("log")
    values = [value for row in rows.values() for value in row]
    ticks = (0.5, 1, 1.5, 2, 3, 5, 8, 12, 20)
    axes.set_xticks([tick for tick in ticks if min(values) <= 1.3 * tick and tick <= 1.3 * max(values)])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_yticks(range(len(rows)), list(rows))
    axes.invert_yaxis()
    set_grid(axes)
    axes.tick_params(axis="y", length=0)
    set_title(axes, title)
    axes.set_xlabel(xlabel)
    set_legend(figure, axes, len(names))
    save(figure, path)


def draw_hit_rates(lines: Mapping[str, Sequence[tuple[float, float]]], path: Path, title: str) -> None:
    """Plot the hit rate of a cache of n-gram rows against its size.

    Args:
        lines: (size of the cache as a fraction of all rows touched, hit rate) of the points of each policy.
        path: file to write.
        title: title of the picture.

    Raises:
        ValueError: there are no points, or the file cannot be written.
    """
    if not any(lines.values()):
        raise ValueError("there are no hit rates to draw")
    figure, (axes,) = new_figure(7.0, 4.4)
    for style, (name, points) in zip(cycle(SERIES), lines.items(), strict=False):
        draw_line(axes, style, [(100 * size, 100 * rate) for size, rate in sorted(points)], name)
    axes.set_ylim(0, 100)
    axes.set_xlim(left=0)
    set_grid(axes, "y")
    axes.set_xlabel("rows in the cache of a worker (% of all rows touched)")
    axes.set_ylabel("reads without a transfer (%)")
    set_legend(figure, axes, len(lines))
    set_title(axes, title)
    save(figure, path)


def draw_loads(loads: Ints, ratios: Mapping[str, Floats], path: Path, title: str) -> None:
    """Draw a heat map of the tokens of each expert by step and, below it, the balance ratio of each placement.

    Args:
        loads: tokens of each expert of one layer, [steps, experts].
        ratios: tokens of the busiest rank over the mean, [steps], by name of the placement.
        path: file to write.
        title: title of the heat map.

    Raises:
        ValueError: the file cannot be written.
    """
    figure, (tokens, balance) = new_figure(10.0, 6.0, heights=(2.0, 1.0))
    picture = tokens.imshow(loads.T, aspect="auto", cmap="Blues", interpolation="nearest", origin="lower")
    figure.colorbar(picture, ax=tokens, label="tokens of an expert")
    tokens.set_ylabel("expert")
    set_title(tokens, title)
    stride = -(-len(loads) // _MOST_POINTS)
    for style, (name, row) in zip(cycle(SERIES), ratios.items(), strict=False):
        draw_line(balance, style, [(step, float(row[step])) for step in range(0, len(row), stride)], name)
    balance.set_xlim(tokens.get_xlim())
    balance.set_xlabel("step")
    balance.set_ylabel("tokens: busiest\nrank / mean")
    set_legend(figure, balance, len(ratios))
    save(figure, path)


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """Return the mean of the last ``window`` values at each position; the first positions average fewer values."""
    parts = (values[max(0, stop - window) : stop] for stop in range(1, len(values) + 1))
    return [sum(part) / len(part) for part in parts]
