"""Plot of activation policies: step time, device memory and host memory against sequence length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path
from typing import Final

from bytescale_ext.draw.figure import SERIES, count_text, draw_line, new_figure, save, set_grid, set_legend, set_title
from bytescale_ext.plan.activation.forecast import ActivationForecast

# Title of each panel, and its value from a forecast and the fastest step time at the same length. Time is relative:
# absolute times differ so little between policies that their lines would coincide.
_PANELS: Final[tuple[tuple[str, Callable[[ActivationForecast, float], float]], ...]] = (
    ("time over the fastest policy (%)", lambda forecast, fastest: 100.0 * (forecast.step_seconds / fastest - 1.0)),
    ("device memory (GB)", lambda forecast, _: forecast.device_bytes / 1e9),
    ("host memory (GB)", lambda forecast, _: forecast.host_bytes / 1e9),
)

_GROUP: Final = 0.6  # width of the dots of one length; lengths are 1 apart


def draw_policies(rows: Sequence[tuple[int, str, ActivationForecast | None]], path: Path) -> None:
    """Plot step time relative to the fastest policy, device memory and host memory against sequence length.

    The dots of a length stand side by side, so equal values of policies do not cover each other. A policy that does not
    fit has no dot.

    Args:
        rows: (tokens, policy, forecast); the forecast is None if the policy does not fit in memory.
        path: file to write; its suffix sets the format.

    Raises:
        ValueError: no policy fits at any length, or the file cannot be written.
    """
    fits = [(tokens, policy, forecast) for tokens, policy, forecast in rows if forecast]
    if not fits:
        raise ValueError("no policy fits at any length: there is nothing to draw")
    lengths = sorted({tokens for tokens, *_ in fits})
    fastest = {length: min(row.step_seconds for tokens, _, row in fits if tokens == length) for length in lengths}
    figure, panels = new_figure(13.0, 4.2, columns=len(_PANELS))
    policies = list(dict.fromkeys(policy for _, policy, _ in rows))
    for axes, (title, value) in zip(panels, _PANELS, strict=True):
        set_title(axes, title)
        for number, (style, policy) in enumerate(zip(cycle(SERIES), policies, strict=False)):
            aside = _GROUP * ((number + 0.5) / len(policies) - 0.5)
            of_policy = [(tokens, forecast) for tokens, name, forecast in fits if name == policy]
            points = [
                (lengths.index(tokens) + aside, value(forecast, fastest[tokens])) for tokens, forecast in of_policy
            ]
            draw_line(axes, style, points, policy)
        axes.set_xticks(range(len(lengths)), [count_text(tokens) for tokens in lengths])
        axes.set_xlim(-0.5, len(lengths) - 0.5)
        axes.set_xlabel("length of a document (tokens)")
        axes.set_ylim(bottom=0.0)
        set_grid(axes)
    set_legend(figure, panels[0], len(policies))
    save(figure, path)
