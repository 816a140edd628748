"""A picture of a schedule of slices: stages over time. matplotlib is imported only where something is drawn."""

from __future__ import annotations

import colorsys
from pathlib import Path
from typing import TYPE_CHECKING

from bytescale_ext.plan.seq1f1b_simulate import Simulated, TimedAction

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ROW = 0.8  # height of a box; stages are 1 apart
_GOLDEN = 0.6180339887498949  # steps of this much hue never come close to each other early


def draw_schedule(result: Simulated, path: Path, title: str) -> None:
    """Draw stages (down) over time (right) into a file; its suffix names the format.

    A colour for each micro-batch, light for forward and full for backward; later slices and chunks are paler. Boxes
    that are wide enough name micro-batch and slice. White is idle.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14.0, 1.3 + 0.5 * len(result.busy)), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for timed in result.actions:
        _draw_action(axes, timed, result.makespan)
    axes.set_xlim(0.0, result.makespan)
    axes.set_ylim(len(result.busy) - 0.5, -0.5)
    axes.set_yticks(range(len(result.busy)), [f"stage {stage}" for stage in range(len(result.busy))])
    axes.set_xticks([])
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.set_title(title, loc="left", fontsize=11)
    figure.savefig(path)


def _draw_action(axes: Axes, timed: TimedAction, makespan: float) -> None:
    action, length = timed.action, timed.stop - timed.start
    axes.barh(timed.stage, length, _ROW, timed.start, color=_colour(timed), edgecolor="white", linewidth=0.5)
    text = f"{action.micro_batch}.{action.slice_index}"
    if length / makespan > 0.007 * len(text):
        middle = (timed.start + timed.stop) / 2
        axes.text(middle, timed.stage, text, ha="center", va="center", fontsize=7, color="#222222")


def _colour(timed: TimedAction) -> tuple[float, float, float]:
    action = timed.action
    hue = (0.58 + action.micro_batch * _GOLDEN) % 1.0
    lightness = (0.78 if action.kind == "F" else 0.56) + min(0.04 * (action.slice_index + action.chunk), 0.12)
    return colorsys.hls_to_rgb(hue, lightness, 0.55)
