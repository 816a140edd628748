"""Timeline of one optimizer step over pages: copies to the host, Adam, copies to the device, disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from bytescale_ext.draw.figure import hue_colour, ink_on, name_rows, new_figure, save, set_title
from bytescale_ext.plan.states.moves import Kind
from bytescale_ext.plan.states.timeline import TimedMove

MOST_MOVES: Final = 3 * 24
"""Number of moves that are drawn, at most. Later moves repeat the same pattern."""

_LANES: Final = {
    Kind.FETCH: "gradients to the host",
    Kind.UPDATE: "Adam",
    Kind.RETURN: "parameters to the device",
    Kind.READ: "pages from the disk",
    Kind.WRITE: "pages to the disk",
}


def draw_moves(moves: Sequence[TimedMove], path: Path, title: str) -> None:
    """Draw the first moves of a step, one colour per page, into a file whose suffix sets the format.

    If the step has more moves than the picture, the title also says how much of the step is shown.

    Args:
        moves: moves of one step, in the order of their start.
        path: file to write.
        title: title of the picture.

    Raises:
        ValueError: there are no moves, or the file cannot be written.
    """
    if not moves:
        raise ValueError("there are no moves to draw")
    shown = moves[:MOST_MOVES]
    end = max(timed.stop for timed in shown)
    lanes = [kind for kind in _LANES if any(timed.move.kind is kind for timed in shown)]
    figure, (axes,) = new_figure(12.0, 1.1 + 0.5 * len(lanes))
    for timed in shown:
        lane, length = lanes.index(timed.move.kind), timed.stop - timed.start
        colour = hue_colour(timed.move.page, 0.66, 0.55)
        is_wide = length > 0.02 * end
        edge = "white" if is_wide else colour  # a white edge would hide a narrow box
        axes.barh(lane, 1e3 * length, 0.8, 1e3 * timed.start, color=colour, edgecolor=edge, linewidth=0.5)
        if is_wide:
            middle = 1e3 * (timed.start + timed.stop) / 2
            axes.text(middle, lane, str(timed.move.page), ha="center", va="center", fontsize=7, color=ink_on(colour))
    axes.set_xlim(1e3 * min(timed.start for timed in shown), 1e3 * end)
    name_rows(axes, [_LANES[kind] for kind in lanes])
    axes.set_xlabel("time (ms)")
    whole = max(timed.stop for timed in moves)
    if len(shown) < len(moves):
        title += f"\nthe first {1e3 * end:,.3g} of {1e3 * whole:,.4g} ms; a number and a colour for each page"
    set_title(axes, title)
    save(figure, path)
