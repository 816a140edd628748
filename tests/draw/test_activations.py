"""The picture of activation policies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bytescale_ext.draw import activations
from bytescale_ext.draw.activations import draw_policies
from bytescale_ext.plan.activation.forecast import Forecast
from tests.draw.png import png_size

ROW = Forecast(transfer_seconds=0.1, recompute_seconds=0.1, step_seconds=1.0, device_bytes=5e9, host_bytes=0.0)


def test_policies_that_fit_somewhere_are_drawn(tmp_path: Path) -> None:
    rows = [(8192, "none", ROW), (8192, "memo", ROW), (16384, "none", None), (16384, "memo", ROW), (8192, "auto", None)]
    draw_policies(rows, tmp_path / "policies.png")
    assert png_size(tmp_path / "policies.png") == (1690, 546)
    with pytest.raises(ValueError, match="no policy fits"):
        draw_policies([(8192, "none", None)], tmp_path / "none.png")


def test_times_are_drawn_beside_the_fastest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[str, list[tuple[float, float]]]] = []
    draw_line = activations.draw_line

    def note(axes: Any, number: int, points: Sequence[tuple[float, float]], label: str) -> None:
        drawn.append((label, [(x, round(y, 6)) for x, y in points]))
        draw_line(axes, number, points, label)

    monkeypatch.setattr(activations, "draw_line", note)
    slow = replace(ROW, step_seconds=1.25)
    rows = [(8192, "none", ROW), (8192, "memo", slow), (16384, "none", None), (16384, "memo", slow)]
    draw_policies(rows, tmp_path / "policies.png")
    assert drawn[:2] == [("none", [(8192, 0.0)]), ("memo", [(8192, 25.0), (16384, 0.0)])]
    assert drawn[2:4] == [("none", [(8192, 5.0)]), ("memo", [(8192, 5.0), (16384, 5.0)])]
