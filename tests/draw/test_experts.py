from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bytescale_ext.draw.experts import draw_loads
from tests.draw.png import png_size


@pytest.mark.parametrize("num_steps", [1, 200])
def test_loads_and_balance_are_drawn(num_steps: int, tmp_path: Path) -> None:
    loads = np.arange(num_steps * 6).reshape(num_steps, 6)
    ratios = {name: np.ones(num_steps) for name in ("static", "flexmoe", "eplb")}
    draw_loads(loads, ratios, tmp_path / "loads.png", "layer 2")
    assert png_size(tmp_path / "loads.png") == (1300, 780)


def test_an_unknown_format(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot write the picture"):
        draw_loads(np.ones((2, 2), np.int64), {"static": np.ones(2)}, tmp_path / "loads.text", "none")
