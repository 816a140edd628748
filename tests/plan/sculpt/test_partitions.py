"""Centres of partitions: parts of limited size, of related vectors."""

from __future__ import annotations

import numpy as np

from bytescale_ext.plan.sculpt.clusters import nearest_exact
from bytescale_ext.plan.sculpt.partitions import partition_centres
from tests.plan.sculpt.topics import unit


def test_parts_are_small_and_alike() -> None:
    random = np.random.RandomState(0)
    topics = random.randint(0, 8, 600) ** 2 // 8  # uneven
    vectors = unit(np.eye(16)[topics] + 0.2 * random.standard_normal((600, 16)))
    centres = partition_centres(vectors, 60, 3)
    label, similarity = nearest_exact(centres, vectors)
    assert len(centres) >= 10
    assert np.bincount(label).max() <= 90  # a vector may be nearer to the centre of another part
    assert similarity.mean() > 0.8
    assert np.array_equal(partition_centres(vectors, 60, 3), centres)


def test_equal_vectors_are_one_part() -> None:
    assert partition_centres(np.zeros((50, 4), np.float32), 10, 0).shape == (1, 4)
    assert partition_centres(unit(np.ones((50, 4))), 10, 0).tolist() == [[0.5] * 4]
