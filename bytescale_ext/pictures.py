"""Pictures: a timeline of ranks and a loss curve. matplotlib is imported only where something is drawn."""

from __future__ import annotations

import colorsys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from bytescale_ext.timeline import COMPUTE_KINDS, Span, SpanShard, shard_parts

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Colour = tuple[float, float, float]

_GREYS: Final = {"wait": (0.90, 0.90, 0.90), "reduce": (0.66, 0.66, 0.66), "optimizer": (0.42, 0.42, 0.42)}
_INK: Final = "#333333"
_ROW: Final = 0.78  # height of a box; ranks are 1 apart
_GOLDEN: Final = 0.6180339887498949  # steps of this much hue never come close to each other early


def draw_timeline(spans: Sequence[Span], path: str | Path, title: str, unit: str = "s") -> None:
    """Draw ranks (down) over time (right) into a PNG or whatever the suffix of ``path`` names.

    A micro-batch is one box per forward and per backward, split among its shards by tokens. Each sequence keeps its
    colour; forward is the light tint. A ring is one frame around its boxes on all its ranks. Grey is
    no computing: waiting, gradient reduction, optimizer; an empty row is idle.

    Args:
        spans: of one step.
        path: file to write.
        title: of the picture.
        unit: of the spans' times.

    Raises:
        ValueError: there is no span.
    """
    if not spans:
        raise ValueError("there is no span to draw")
    ranks = sorted({span.rank for span in spans})
    rows = {rank: row for row, rank in enumerate(range(ranks[-1] + 1))}
    origin = min(span.start for span in spans)
    length = max(span.stop for span in spans) - origin
    figure, axes = _new_figure(14.0, min(1.9 + 0.46 * len(rows), 5.2 + 0.115 * len(rows)))
    _draw_boxes(axes, spans, origin)
    inches_per_row = (figure.get_figheight() - 1.5) / len(rows)
    _draw_rings(axes, spans, origin, length)
    _draw_labels(axes, spans, origin, length, inches_per_row)
    axes.set_xlim(0.0, length * 1.005 or 1.0)
    axes.set_ylim(len(rows) - 0.42, -0.58)
    step = next(step for step in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 4096) if len(rows) / step <= 24)
    axes.set_yticks(range(0, len(rows), step), [f"rank {rank}" for rank in range(0, len(rows), step)])
    axes.set_xlabel(f"time ({unit})" if unit == "s" else unit)
    axes.tick_params(axis="y", length=0)
    _draw_legend(axes, {span.kind for span in spans}, any(_rings_of(span) for span in spans))
    _save(figure, axes, path, title)


def draw_loss(steps: Sequence[int], losses: Sequence[float], path: str | Path, title: str = "loss") -> None:
    """Draw a loss curve: every step thin, and a running mean over it once there are 50 steps.

    Raises:
        ValueError: no step, or as many losses as steps are not given.
    """
    if not steps or len(steps) != len(losses):
        raise ValueError(f"a loss curve needs one loss for each step; got {len(steps)} steps and {len(losses)} losses")
    figure, axes = _new_figure(8.0, 4.5)
    smooth = len(steps) >= 50
    axes.plot(steps, losses, color="#4c78a8", linewidth=0.8 if smooth else 1.6, alpha=0.45 if smooth else 1.0)
    if smooth:
        window = max(5, len(steps) // 50)
        axes.plot(steps, _running_mean(losses, window), color="#1f3f66", linewidth=1.8, label=f"mean of {window} steps")
        axes.legend(frameon=False, fontsize=9)
    axes.annotate(
        f"{losses[-1]:.3f}", (steps[-1], losses[-1]), xytext=(5, 0), textcoords="offset points", va="center", fontsize=9
    )
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_xlabel("step")
    axes.set_ylabel("loss per token")
    axes.margins(x=0.02)
    _save(figure, axes, path, title)


def draw_bars(names: Sequence[str], means: Sequence[float], worsts: Sequence[float], path: str | Path, title: str,
              xlabel: str) -> None:  # fmt: skip
    """Draw a bar for each name: its mean, and a mark at its worst.

    Raises:
        ValueError: there is nothing to draw, or not one mean and one worst for each name.
    """
    if not names or not len(names) == len(means) == len(worsts):
        raise ValueError(f"bars need a mean and a worst each; got {len(names)}, {len(means)} and {len(worsts)}")
    figure, axes = _new_figure(8.0, 1.4 + 0.5 * len(names))
    rows = range(len(names))
    axes.barh(rows, means, height=0.62, color="#4c78a8", label="mean")
    axes.plot(worsts, rows, linestyle="none", marker="|", markersize=18, markeredgewidth=2, color=_INK, label="worst")
    for row, (mean, worst) in enumerate(zip(means, worsts, strict=True)):
        axes.annotate(f"{mean:.3g}", (max(mean, worst), row), xytext=(6, 0), textcoords="offset points", va="center",
                      fontsize=9, color=_INK)  # fmt: skip
    axes.set_yticks(rows, names)
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.margins(x=0.1)
    axes.set_xlabel(xlabel)
    axes.legend(frameon=False, fontsize=9, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2)
    _save(figure, axes, path, title)


@dataclass
class _Frame:
    """The area of one ring's boxes: ranks [first, last], time [start, stop)."""

    shard: SpanShard
    start: float
    stop: float
    first: int
    last: int


def _running_mean(values: Sequence[float], window: int) -> list[float]:
    """Mean of the last ``window`` values (fewer at the beginning)."""
    means = []
    for index in range(len(values)):
        part = values[max(0, index + 1 - window) : index + 1]
        means.append(sum(part) / len(part))
    return means


def _new_figure(width: float, height: float) -> tuple[Figure, Axes]:
    """A figure of its own canvas: no pyplot, so no global state and no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def _save(figure: Figure, axes: Axes, path: str | Path, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, color=_INK, pad=10)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#999999")
    axes.tick_params(colors=_INK, labelsize=9)
    figure.savefig(Path(path))


def _sequence_colour(seq: int, is_ring: bool, kind: str) -> Colour:
    """The colour of a sequence: hue by its number, strong for rings and soft for local ones; forward is a tint."""
    hue = (0.58 + seq * _GOLDEN) % 1.0
    red, green, blue = colorsys.hls_to_rgb(hue, 0.50 if is_ring else 0.66, 0.55 if is_ring else 0.40)
    tint = 0.50 if kind == "forward" else 0.0
    return (red + (1 - red) * tint, green + (1 - green) * tint, blue + (1 - blue) * tint)


def _rings_of(span: Span) -> list[SpanShard]:
    return [shard for shard in span.shards if len(shard.ring) > 1]


def _draw_boxes(axes: Axes, spans: Sequence[Span], origin: float) -> None:
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    num_rows = max(span.rank for span in spans) + 1
    end = max(span.stop for span in spans) - origin
    boxes = [
        Rectangle((0.0, row - _ROW / 2), end, _ROW, facecolor="#f7f7f7", edgecolor="none") for row in range(num_rows)
    ]
    outlines = []
    for span in spans:
        corner = (span.start - origin, span.rank - _ROW / 2)
        if not span.shards:
            colour = _GREYS.get(span.kind, (0.8, 0.8, 0.8))
            boxes.append(Rectangle(corner, span.stop - span.start, _ROW, facecolor=colour, edgecolor="none"))
            continue
        for shard, start, stop in shard_parts(span):
            colour = _sequence_colour(shard.seq, len(shard.ring) > 1, span.kind)
            part = (start - origin, span.rank - _ROW / 2)
            edge = "white" if stop - start > 0.003 * end else colour  # else white lines would wash out narrow boxes
            boxes.append(Rectangle(part, stop - start, _ROW, facecolor=colour, edgecolor=edge, linewidth=0.25))
        outlines.append(Rectangle(corner, span.stop - span.start, _ROW))
    axes.add_collection(PatchCollection(boxes, match_original=True))
    edges = PatchCollection(outlines, facecolor="none", edgecolor="white", linewidth=0.9 if num_rows <= 24 else 0.45)
    edges.set_alpha(0.45)
    axes.add_collection(edges)


def _frames(spans: Sequence[Span], origin: float) -> list[tuple[str, _Frame]]:
    """One frame for each kind and ring sequence, over the boxes of all its members."""
    frames: dict[tuple[str, int], _Frame] = {}
    for span in spans:
        for shard, start, stop in shard_parts(span):
            if len(shard.ring) < 2 or span.kind not in COMPUTE_KINDS:
                continue
            start, stop = start - origin, stop - origin
            frame = frames.setdefault((span.kind, shard.seq), _Frame(shard, start, stop, span.rank, span.rank))
            frame.start, frame.stop = min(frame.start, start), max(frame.stop, stop)
            frame.first, frame.last = min(frame.first, span.rank), max(frame.last, span.rank)
    return [(kind, frame) for (kind, _), frame in frames.items()]


def _draw_rings(axes: Axes, spans: Sequence[Span], origin: float, length: float) -> None:
    """A frame around each ring; on many ranks the gaps between rows are filled, which makes it one block."""
    from matplotlib.patches import Rectangle

    for kind, frame in _frames(spans, origin):
        colour = _sequence_colour(frame.shard.seq, True, "backward")
        dark: Colour = (colour[0] * 0.6, colour[1] * 0.6, colour[2] * 0.6)
        corner = (frame.start, frame.first - _ROW / 2)
        size = (frame.stop - frame.start, frame.last - frame.first + _ROW)
        fill = _sequence_colour(frame.shard.seq, True, kind)
        axes.add_patch(Rectangle(corner, *size, facecolor=fill, edgecolor="none", zorder=0.5))
        thick = 1.6 if size[0] > 0.01 * length else 0.8
        axes.add_patch(Rectangle(corner, *size, facecolor="none", edgecolor=dark, linewidth=thick, zorder=3))


def _draw_labels(axes: Axes, spans: Sequence[Span], origin: float, length: float, inches_per_row: float) -> None:
    """Name the rings, and the local sequences of wide boxes, where the text fits."""
    inches = 12.5 / length if length else 0.0
    for kind, frame in _frames(spans, origin):
        members = len(frame.shard.ring)
        texts = (
            f"seq {frame.shard.seq}\n{_count_text(frame.shard.length)} on {members}",
            f"seq {frame.shard.seq}",
            f"{frame.shard.seq}",
        )
        width = (frame.stop - frame.start) * inches
        height = (frame.last - frame.first + _ROW) * inches_per_row
        text = _fitting_text(texts, width, height)
        colour = _INK if kind == "forward" else "white"
        middle = ((frame.start + frame.stop) / 2, float((frame.first + frame.last) // 2))  # on a row, not between
        axes.text(*middle, text, ha="center", va="center", fontsize=8, color=colour, zorder=4)
    for span in spans:
        for shard, start, stop in shard_parts(span):
            if len(shard.ring) > 1:
                continue
            text = _fitting_text((f"{shard.seq}",), (stop - start) * inches, _ROW * inches_per_row)
            middle = ((start + stop) / 2 - origin, float(span.rank))
            if text:
                axes.text(*middle, text, ha="center", va="center", fontsize=7, color=_INK, zorder=4)


def _fitting_text(texts: Sequence[str], width: float, height: float) -> str:
    """The first text that fits on ``width`` x ``height`` inches, or an empty one."""
    for text in texts:
        lines = text.split("\n")
        if max(map(len, lines)) * 0.075 + 0.06 <= width and len(lines) * 0.15 <= height:
            return text
    return ""


def _count_text(count: int) -> str:
    """1234 -> 1.2K; with K = 1024, as context lengths are named."""
    for size, name in ((1 << 20, "M"), (1 << 10, "K")):
        if count >= size:
            return f"{count / size:.3g}{name}"
    return str(count)


def _draw_legend(axes: Axes, kinds: set[str], has_rings: bool) -> None:
    from matplotlib.patches import Patch

    entries: list[Any] = [
        Patch(facecolor=_sequence_colour(0, True, kind), label=kind) for kind in COMPUTE_KINDS if kind in kinds
    ]
    if has_rings:
        entries.append(Patch(facecolor="none", edgecolor=_INK, linewidth=1.4, label="ring: one sequence on many ranks"))
    names = {"wait": "waiting", "reduce": "gradient reduction", "optimizer": "optimizer"}
    entries += [Patch(facecolor=_GREYS[kind], label=name) for kind, name in names.items() if kind in kinds]
    entries.append(Patch(facecolor="#f7f7f7", edgecolor="#dddddd", linewidth=0.6, label="idle"))
    axes.legend(
        handles=entries,
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        ncols=len(entries),
        frameon=False,
        fontsize=8,
        handlelength=1.2,
        columnspacing=1.2,
        borderaxespad=0.2,
    )
