"""The picture of activation policies."""

from __future__ import annotations

from pathlib import Path

import pytest

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
