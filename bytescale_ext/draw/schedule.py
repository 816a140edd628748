"""Picture of a pipeline schedule of slices: stages over time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from bytescale_ext.draw.figure import FRAME, INK, Colour, hue_colour, ink_on, new_figure, save, set_rows, set_title
from bytescale_ext.plan.schedule.simulate import SimulatedSchedule, TimedAction

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ROW: Final = 0.8  # height of a box; stages are 1 apart
_LIGHTNESS: Final = {"F": 0.78, "B": 0.56, "W": 0.4}
_SATURATION: Final = 0.55
_NAMES: Final = {"F": "forward", "B": "backward", "W": "weight gradients"}


def draw_schedule(result: SimulatedSchedule, path: Path, title: str) -> None:
    """Draw stages (vertical) over time (horizontal) into a file, whose suffix sets the format.

    Each micro-batch has a colour: light for forward, full for backward, dark for weight gradients. Later slices and
    chunks are paler, and idle time is white. Boxes that are wide enough show their micro-batch and slice.

    Args:
        result: times of the actions of all stages.
        path: file to write.
        title: title of the picture.

    Raises:
        ValueError: the file cannot be written.
    """
    from matplotlib.ticker import FuncFormatter, MultipleLocator

    num_stages = len(result.busy)
    ideal = sum(result.busy) / num_stages
    figure, (axes,) = new_figure(14.0, 1.9 + 0.5 * num_stages)
    for timed in result.actions:
        _draw_action(axes, timed, result.makespan)
    axes.set_xlim(0.0, result.makespan)
    axes.xaxis.set_major_locator(MultipleLocator(ideal / 5))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda time, _: f"{time / ideal:.1f}"))
    axes.set_ylim(num_stages - 0.5, -0.5)
    set_rows(axes, range(num_stages), "stage")
    axes.set_xlabel("time (1: the same work without idle time)")
    set_title(axes, title)
    _draw_legend(figure, {timed.action.kind for timed in result.actions})
    save(figure, path)


def _draw_legend(figure: Figure, kinds: set[str]) -> None:
    from matplotlib.patches import Patch

    entries = [
        Patch(facecolor=hue_colour(0, _LIGHTNESS[kind], _SATURATION), label=name)
        for kind, name in _NAMES.items()
        if kind in kinds
    ]
    entries.append(Patch(facecolor="white", edgecolor=FRAME, linewidth=0.6, label="idle"))
    entries.append(Patch(facecolor="none", label="2.1: micro-batch 2, slice 1"))
    figure.legend(handles=entries, frameon=False, fontsize=9, labelcolor=INK, loc="outside lower center",
                  ncols=len(entries))  # fmt: skip


def _draw_action(axes: Axes, timed: TimedAction, makespan: float) -> None:
    action, length, colour = timed.action, timed.stop - timed.start, _colour(timed)
    axes.barh(timed.stage, length, _ROW, timed.start, color=colour, edgecolor="white", linewidth=0.5)
    text = f"{action.micro_batch}.{action.slice_index}"
    if length / makespan > 0.007 * len(text):
        middle = (timed.start + timed.stop) / 2
        axes.text(middle, timed.stage, text, ha="center", va="center", fontsize=7, color=ink_on(colour))


def _colour(timed: TimedAction) -> Colour:
    action = timed.action
    lightness = _LIGHTNESS[action.kind] + min(0.04 * (action.slice_index + action.chunk), 0.12)
    return hue_colour(action.micro_batch, lightness, _SATURATION)
