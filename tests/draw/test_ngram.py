from __future__ import annotations

from pathlib import Path

import pytest

from bytescale_ext.draw.ngram import draw_hit_rates
from tests.draw.png import png_size


def test_a_line_for_each_policy(tmp_path: Path) -> None:
    path = tmp_path / "hits.png"
    draw_hit_rates({"lru": [(0.5, 0.9), (0.1, 0.4)], "lfu": [(0.1, 0.5)]}, path, "rows")
    assert png_size(path) is not None
    svg = tmp_path / "hits.svg"
    draw_hit_rates({"lru": [(0.1, 0.4)]}, svg, "rows")
    assert "<svg" in svg.read_text()


def test_what_cannot_be_drawn(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no hit rates"):
        draw_hit_rates({"lru": []}, tmp_path / "a.png", "rows")
    with pytest.raises(ValueError, match="cannot write the picture"):
        draw_hit_rates({"lru": [(0.1, 0.4)]}, tmp_path / "none" / "a.png", "rows")
