"""The picture of ``bytescale activations``: time and memory of policies against length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from bytescale_ext.draw.figure import GRID, INK, draw_line, new_figure, save, set_title
from bytescale_ext.plan.activation.forecast import Forecast

_PANELS: Final[tuple[tuple[str, Callable[[int, Forecast], float]], ...]] = (
    ("time of the layers: microseconds per token", lambda tokens, found: found.step_seconds * 1e6 / tokens),
    ("device memory: GB", lambda tokens, found: found.device_bytes / 1e9),
    ("host memory: GB", lambda tokens, found: found.host_bytes / 1e9),
)


def draw_policies(rows: Sequence[tuple[int, str, Forecast | None]], path: Path) -> None:
    """Draw time per token, device memory and host memory of each policy against length, into a file.

    Args:
        rows: (tokens, policy, forecast), None where the policy does not fit.
        path: file to write; its suffix names the format.

    Raises:
        ValueError: nothing fits, or the file cannot be written.
    """
    if not any(found for *_, found in rows):
        raise ValueError("no policy fits at any length: there is nothing to draw")
    figure, panels = new_figure(13.0, 4.2, columns=len(_PANELS))
    policies = list(dict.fromkeys(policy for _, policy, _ in rows))
    for axes, (title, value) in zip(panels, _PANELS, strict=True):
        set_title(axes, title)
        for number, policy in enumerate(policies):
            points = [(tokens, value(tokens, found)) for tokens, name, found in rows if name == policy and found]
            draw_line(axes, number, points, policy)
        lengths = sorted({tokens for tokens, _, found in rows if found})
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [f"{tokens >> 10}K" for tokens in lengths])
        axes.set_xlabel("tokens")
        axes.set_ylim(bottom=0.0)
        axes.grid(color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
    panels[0].legend(frameon=False, fontsize=9, labelcolor=INK, handlelength=3.0)
    save(figure, path)
