"""Picture of a pipeline schedule of slices: stages over time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from bytescale_ext.draw.figure import Colour, hue_colour, ink_on, new_figure, save, set_rows, set_title
from bytescale_ext.plan.schedule.simulate import SimulatedSchedule, TimedAction

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ROW = 0.8  # height of a box; stages are 1 apart


def draw_schedule(result: SimulatedSchedule, path: Path, title: str) -> None:
    """Draw stages (vertical) over time (horizontal) into a file, whose suffix sets the format.

    Each micro-batch has a colour: light for forward, full for backward, dark for weight gradients. Later slices and
    chunks are paler, and idle time is white. Boxes that are wide enough show their micro-batch and slice.
    Raises ValueError if the file cannot be written.
    """
    num_stages = len(result.busy)
    figure, (axes,) = new_figure(14.0, 1.3 + 0.5 * num_stages)
    for timed in result.actions:
        _draw_action(axes, timed, result.makespan)
    axes.set_xlim(0.0, result.makespan)
    axes.set_ylim(num_stages - 0.5, -0.5)
    set_rows(axes, range(num_stages), "stage")
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    set_title(axes, title)
    save(figure, path)


def _draw_action(axes: Axes, timed: TimedAction, makespan: float) -> None:
    action, length, colour = timed.action, timed.stop - timed.start, _colour(timed)
    axes.barh(timed.stage, length, _ROW, timed.start, color=colour, edgecolor="white", linewidth=0.5)
    text = f"{action.micro_batch}.{action.slice_index}"
    if length / makespan > 0.007 * len(text):
        middle = (timed.start + timed.stop) / 2
        axes.text(middle, timed.stage, text, ha="center", va="center", fontsize=7, color=ink_on(colour))


def _colour(timed: TimedAction) -> Colour:
    action = timed.action
    lightness = {"F": 0.78, "B": 0.56, "W": 0.4}[action.kind] + min(0.04 * (action.slice_index + action.chunk), 0.12)
    return hue_colour(action.micro_batch, lightness, 0.55)
