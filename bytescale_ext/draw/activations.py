"""The picture of ``bytescale activations``: time and memory of policies against length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from bytescale_ext.draw.figure import GRID, INK, draw_line, new_figure, save, set_title
from bytescale_ext.plan.activation.forecast import Forecast

# Title, and the value of a forecast beside the fastest step of its length: in seconds all policies share one line.
_PANELS: Final[tuple[tuple[str, Callable[[Forecast, float], float]], ...]] = (
    ("time over the fastest policy: %", lambda found, fastest: 100.0 * (found.step_seconds / fastest - 1.0)),
    ("device memory: GB", lambda found, _: found.device_bytes / 1e9),
    ("host memory: GB", lambda found, _: found.host_bytes / 1e9),
)


def draw_policies(rows: Sequence[tuple[int, str, Forecast | None]], path: Path) -> None:
    """Draw time beside the fastest, device memory and host memory of each policy against length, into a file.

    Args:
        rows: (tokens, policy, forecast), None where the policy does not fit.
        path: file to write; its suffix names the format.

    Raises:
        ValueError: nothing fits, or the file cannot be written.
    """
    if not any(found for *_, found in rows):
        raise ValueError("no policy fits at any length: there is nothing to draw")
    fits = [(tokens, policy, found) for tokens, policy, found in rows if found]
    lengths = sorted({tokens for tokens, *_ in fits})
    fastest = {length: min(found.step_seconds for tokens, _, found in fits if tokens == length) for length in lengths}
    figure, panels = new_figure(13.0, 4.2, columns=len(_PANELS))
    policies = list(dict.fromkeys(policy for _, policy, _ in rows))
    for axes, (title, value) in zip(panels, _PANELS, strict=True):
        set_title(axes, title)
        for number, policy in enumerate(policies):
            points = [(tokens, value(found, fastest[tokens])) for tokens, name, found in fits if name == policy]
            draw_line(axes, number, points, policy)
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [f"{tokens >> 10}K" for tokens in lengths])
        axes.set_xlabel("tokens")
        axes.set_ylim(bottom=0.0)
        axes.grid(color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
    panels[0].legend(frameon=False, fontsize=9, labelcolor=INK, handlelength=3.0)
    save(figure, path)
