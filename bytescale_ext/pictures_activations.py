"""The picture of ``bytescale activations``: time and memory against length. matplotlib is imported where it draws."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bytescale_ext.plan.activation_forecast import Forecast


def draw_policies(rows: Sequence[tuple[int, str, Forecast | None]], path: Path) -> None:
    """Draw time per token, device memory and host memory of each policy against length, into a file.

    Args:
        rows: (tokens, policy, forecast), None where the policy does not fit.
        path: file to write; its suffix names the format.

    Raises:
        ValueError: nothing fits, or the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if not any(found for *_, found in rows):
        raise ValueError("no policy fits at any length: there is nothing to draw")
    figure = Figure(figsize=(12.0, 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    titles = ("layers: microseconds a token", "device memory: GB", "host memory: GB")
    for axes, title in zip(figure.subplots(1, 3), titles, strict=True):
        axes.set_title(title, fontsize=10)
        axes.set_xscale("log", base=2)
        axes.set_xlabel("tokens")
        for policy in dict.fromkeys(policy for _, policy, _ in rows):
            points = [(tokens, found) for tokens, name, found in rows if name == policy and found is not None]
            values = [_value(title, tokens, found) for tokens, found in points]
            style = {"linestyle": "--", "color": "black"} if policy == "auto" else {"marker": "o", "markersize": 3}
            axes.plot([tokens for tokens, _ in points], values, label=policy, **style)
        axes.grid(color="#e6e6e6", linewidth=0.8)
    axes.legend(frameon=False, fontsize=9)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ValueError(f"--plot {path} cannot be written: {error}") from error


def _value(title: str, tokens: int, found: Forecast) -> float:
    if title.startswith("layers"):
        return found.step_seconds * 1e6 / tokens
    return (found.device_bytes if title.startswith("device") else found.host_bytes) / 1e9
