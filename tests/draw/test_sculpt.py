from __future__ import annotations

from pathlib import Path

import numpy as np

from bytescale_ext.draw.sculpt import draw_clusters, plane
from tests.draw.png import png_size


def test_clusters_are_drawn(tmp_path: Path) -> None:
    random = np.random.RandomState(0)
    vectors = random.standard_normal((6000, 5)).astype(np.float32)
    draw_clusters(vectors, random.randint(0, 30, 6000), np.full(6000, 9), tmp_path / "map.png")
    assert png_size(tmp_path / "map.png") == (1430, 624)


def test_one_document_is_drawn(tmp_path: Path) -> None:
    draw_clusters(np.ones((1, 1), dtype=np.float32), np.zeros(1, dtype=np.int64), np.array([4]), tmp_path / "one.png")
    assert png_size(tmp_path / "one.png") == (1430, 624)


def test_the_plane_shows_the_largest_differences() -> None:
    vectors = np.array([[0, 0, 3.0], [0, 0, -3], [1, 0, 0], [-1, 0, 0]])
    assert np.allclose(np.abs(plane(vectors)), [[3, 0], [3, 0], [0, 1], [0, 1]])
