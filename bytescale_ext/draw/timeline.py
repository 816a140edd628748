"""Picture of a measured or planned step: ranks over time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from bytescale_ext.draw.figure import (
    FRAME,
    GREYS,
    IDLE,
    INK,
    PADDING,
    Colour,
    count_text,
    hue_colour,
    ink_on,
    new_figure,
    save,
    set_rows,
    set_title,
    tinted,
)
from bytescale_ext.measure.timeline import COMPUTE_KINDS, Phase, PhaseShard, shard_parts

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ROW: Final = 0.78  # height of a box; ranks are 1 apart
_WIDTH: Final = 12.5  # inches of the time axis


def draw_timeline(phases: Sequence[Phase], path: Path, title: str, unit: str = "s") -> None:
    """Draw ranks (vertical) over time (horizontal) into a file, whose suffix sets the format.

    A micro-batch has one box for its forward pass and one for its backward pass. Each box is divided among the shards
    of the micro-batch in proportion to their tokens. A document has the same colour everywhere; forward is lighter. A
    frame encloses the boxes of a ring on all its ranks. Waiting, gradient reduction and the optimizer are grey; an
    empty row is idle.

    Args:
        phases: phases of one step.
        path: file to write.
        title: title of the picture.
        unit: unit of the phases' times, for the axis label.

    Raises:
        ValueError: there are no phases, or the file cannot be written.
    """
    draw_timelines([(title, phases)], path, unit)


def draw_timelines(steps: Sequence[tuple[str, Sequence[Phase]]], path: Path, unit: str = "s") -> None:
    """Draw several steps below each other on the same time axis, each as ``draw_timeline`` draws a single step.

    Args:
        steps: (title, phases) of each step.
        path: file to write.
        unit: unit of the phases' times, for the axis label.

    Raises:
        ValueError: a step has no phases, or the file cannot be written.
    """
    if not all(phases for _, phases in steps):
        raise ValueError("there are no phases to draw")
    num_rows = [max(phase.rank for phase in phases) + 1 for _, phases in steps]
    heights = [min(2.1 + 0.46 * rows, 5.4 + 0.115 * rows) for rows in num_rows]
    figure, panels = new_figure(14.0, sum(heights), heights=heights)
    longest = max(max(phase.stop for phase in phases) - min(phase.start for phase in phases) for _, phases in steps)
    for axes, (title, phases), rows, height in zip(panels, steps, num_rows, heights, strict=True):
        origin = min(phase.start for phase in phases)
        _draw_boxes(axes, phases, origin)
        _draw_rings(axes, phases, origin, longest)
        _draw_labels(axes, phases, origin, longest, (height - 1.7) / rows)
        axes.set_xlim(0.0, longest * 1.005 or 1.0)
        axes.set_ylim(rows - 0.42, -0.58)
        step = next(step for step in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 4096) if rows / step <= 24)
        set_rows(axes, range(0, rows, step), "rank")
        set_title(axes, title)
    panels[-1].set_xlabel(f"{'time' if unit == 's' else 'work'} ({unit})")
    all_phases = [phase for _, phases in steps for phase in phases]
    has_rings = any(len(shard.ring) > 1 for phase in all_phases for shard in phase.shards)
    _draw_legend(figure, {phase.kind for phase in all_phases}, has_rings)
    save(figure, path)


@dataclass(frozen=True)
class _Frame:
    """Area of a ring's boxes in one pass.

    Attributes:
        kind: ``forward`` or ``backward``.
        shard: shard of one rank of the ring.
        rows: (start, stop) of the ring's box, by rank.
    """

    kind: str
    shard: PhaseShard
    rows: dict[int, tuple[float, float]]

    @property
    def narrowest(self) -> float:
        """Width of the narrowest box."""
        return min(stop - start for start, stop in self.rows.values())

    @property
    def shared(self) -> tuple[float, float]:
        """(start, stop) of the time that the boxes of all ranks have in common; empty if start >= stop."""
        return max(start for start, _ in self.rows.values()), min(stop for _, stop in self.rows.values())

    def outline(self) -> list[tuple[float, float]]:
        """Return the corners (time, row) of a polygon around the boxes, which start and end at their own times."""
        ranks = sorted(self.rows)
        left = [(self.rows[rank][0], rank + side * _ROW / 2) for rank in ranks for side in (-1, 1)]
        right = [(self.rows[rank][1], rank + side * _ROW / 2) for rank in ranks for side in (-1, 1)]
        return left + right[::-1]


def _sequence_colour(seq: int, is_ring: bool, kind: str) -> Colour:
    """Return the colour of a document: strong in a ring, soft on a single rank, and lighter in the forward pass."""
    colour = hue_colour(seq, 0.50, 0.55) if is_ring else hue_colour(seq, 0.66, 0.40)
    return tinted(colour, 0.50 if kind == "forward" else 0.0)


def _draw_boxes(axes: Axes, phases: Sequence[Phase], origin: float) -> None:
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    num_rows = max(phase.rank for phase in phases) + 1
    end = max(phase.stop for phase in phases) - origin
    boxes = [Rectangle((0.0, row - _ROW / 2), end, _ROW, facecolor=IDLE, edgecolor="none") for row in range(num_rows)]
    outlines = []
    for phase in phases:
        corner = (phase.start - origin, phase.rank - _ROW / 2)
        if not phase.shards:
            colour = GREYS.get(phase.kind, PADDING)
            boxes.append(Rectangle(corner, phase.stop - phase.start, _ROW, facecolor=colour, edgecolor="none"))
            continue
        for shard, start, stop in shard_parts(phase):
            colour = _sequence_colour(shard.seq, len(shard.ring) > 1, phase.kind)
            part = (start - origin, phase.rank - _ROW / 2)
            edge = "white" if stop - start > 0.003 * end else colour  # white lines would wash out narrow boxes
            boxes.append(Rectangle(part, stop - start, _ROW, facecolor=colour, edgecolor=edge, linewidth=0.25))
        outlines.append(Rectangle(corner, phase.stop - phase.start, _ROW))
    axes.add_collection(PatchCollection(boxes, match_original=True))
    edges = PatchCollection(outlines, facecolor="none", edgecolor="white", linewidth=0.9 if num_rows <= 24 else 0.45)
    edges.set_alpha(0.45)
    axes.add_collection(edges)


def _frames(phases: Sequence[Phase], origin: float) -> list[_Frame]:
    """Return a frame for each pass of each ring (one pass per slice)."""
    frames: dict[tuple[str, int, int], _Frame] = {}
    passes: Counter[tuple[str, int, int]] = Counter()
    for phase in phases:
        for shard, start, stop in shard_parts(phase):
            if len(shard.ring) < 2 or phase.kind not in COMPUTE_KINDS:
                continue
            key = (phase.kind, shard.seq, phase.rank)
            frame = frames.setdefault((phase.kind, shard.seq, passes[key]), _Frame(phase.kind, shard, {}))
            frame.rows[phase.rank] = (start - origin, stop - origin)
            passes[key] += 1
    return list(frames.values())


def _draw_rings(axes: Axes, phases: Sequence[Phase], origin: float, length: float) -> None:
    """Draw a frame around each ring, and fill the gaps between its rows so that the ring is one block."""
    from matplotlib.patches import Polygon

    for frame in _frames(phases, origin):
        colour = _sequence_colour(frame.shard.seq, True, "backward")
        dark: Colour = (colour[0] * 0.6, colour[1] * 0.6, colour[2] * 0.6)
        fill = _sequence_colour(frame.shard.seq, True, frame.kind)
        axes.add_patch(Polygon(frame.outline(), facecolor=fill, edgecolor="none", zorder=0.5))
        points = 72.0 * _WIDTH * frame.narrowest / length if length else 0.0
        width = min(2.8, max(0.3, 0.3 * points))  # a wider line would hide a narrow box
        edge = Polygon(frame.outline(), facecolor="none", edgecolor=dark, linewidth=width, zorder=3)
        axes.add_patch(edge)
        edge.set_clip_path(edge)  # draws only the inner half of the line, so it does not cover neighbouring boxes


def _ring_label(frame: _Frame, inches: float, inches_per_row: float) -> tuple[float, float, str]:
    """Return (time, row, text) of a ring's label, with the longest text that fits.

    The label is in the box of the middle rank or, if it does not fit there, in the area that all boxes share. The text
    is empty if nothing fits.

    Args:
        frame: frame of the ring.
        inches: width of one unit of time, in inches.
        inches_per_row: height of a row, in inches.
    """
    ranks = sorted(frame.rows)
    members, length = len(frame.shard.ring), count_text(frame.shard.length)
    middle = ranks[(len(ranks) - 1) // 2]
    areas = [(*frame.rows[middle], middle, _ROW), (*frame.shared, (ranks[0] + ranks[-1]) / 2, len(ranks) - 1 + _ROW)]
    name = f"document {frame.shard.seq}"
    for text in (f"{name}\n{length} on {members}", name, f"{frame.shard.seq}"):
        for start, stop, row, height in areas:
            if _fitting_text((text,), (stop - start) * inches, height * inches_per_row):
                return (start + stop) / 2, row, text
    return 0.0, 0.0, ""


def _draw_labels(axes: Axes, phases: Sequence[Phase], origin: float, length: float, inches_per_row: float) -> None:
    """Label the rings and the documents of single ranks if the text fits in their boxes."""
    inches = _WIDTH / length if length else 0.0
    for frame in _frames(phases, origin):
        time, row, text = _ring_label(frame, inches, inches_per_row)
        colour = ink_on(_sequence_colour(frame.shard.seq, True, frame.kind))
        axes.text(time, row, text, ha="center", va="center", fontsize=8, color=colour, zorder=4)
    for phase in phases:
        for shard, start, stop in shard_parts(phase):
            if len(shard.ring) > 1:
                continue
            text = _fitting_text((f"{shard.seq}",), (stop - start) * inches, _ROW * inches_per_row)
            middle = ((start + stop) / 2 - origin, float(phase.rank))
            if text:
                colour = ink_on(_sequence_colour(shard.seq, False, phase.kind))
                axes.text(*middle, text, ha="center", va="center", fontsize=7, color=colour, zorder=4)


def _fitting_text(texts: Sequence[str], width: float, height: float) -> str:
    """Return the first text that fits in ``width`` x ``height`` inches, or an empty string."""
    for text in texts:
        lines = text.split("\n")
        if max(map(len, lines)) * 0.075 + 0.06 <= width and len(lines) * 0.15 <= height:
            return text
    return ""


def _draw_legend(figure: Figure, kinds: set[str], has_rings: bool) -> None:
    from matplotlib.patches import Patch

    entries = [Patch(facecolor=_sequence_colour(0, True, kind), label=kind) for kind in COMPUTE_KINDS if kind in kinds]
    if has_rings:
        entries.append(Patch(facecolor="none", edgecolor=INK, linewidth=1.4, label="ring: one document on many ranks"))
    names = {"wait": "waiting", "reduce": "gradient reduction", "optimizer": "optimizer"}
    entries += [Patch(facecolor=GREYS[kind], label=name) for kind, name in names.items() if kind in kinds]
    entries.append(Patch(facecolor=IDLE, edgecolor=FRAME, linewidth=0.6, label="idle"))
    figure.legend(handles=entries, loc="outside lower center", ncols=len(entries), frameon=False, fontsize=9,
                  labelcolor=INK)  # fmt: skip
