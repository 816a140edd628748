"""A picture of the loads of experts: how many tokens each gets in each step, and how even each placement makes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from bytescale_ext.draw.figure import draw_line, new_figure, save, set_title
from bytescale_ext.plan.experts.placement import Floats, Ints

MOST_POINTS = 60


def draw_loads(loads: Ints, ratios: Mapping[str, Floats], path: Path, title: str) -> None:
    """Draw the tokens of each expert by step as a map, and the balance ratio of each placement below it.

    Args:
        loads: [steps, experts] of one layer.
        ratios: by the name of the placement, [steps] tokens of the busiest rank over the mean.
        path: file to write.
        title: of the map.

    Raises:
        ValueError: the file cannot be written.
    """
    figure, (tokens, balance) = new_figure(10.0, 6.0, heights=(2.0, 1.0))
    picture = tokens.imshow(loads.T, aspect="auto", cmap="Blues", interpolation="nearest", origin="lower")
    figure.colorbar(picture, ax=tokens, label="tokens")
    tokens.set_ylabel("expert")
    set_title(tokens, title)
    stride = -(-len(loads) // MOST_POINTS)
    for number, (name, row) in enumerate(ratios.items()):
        draw_line(balance, number, [(step, float(row[step])) for step in range(0, len(row), stride)], name)
    balance.set_xlabel("step")
    balance.set_ylabel("busiest rank / mean")
    balance.legend(frameon=False, fontsize=9)
    save(figure, path)
