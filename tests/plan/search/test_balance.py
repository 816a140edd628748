from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from bytescale_ext.plan.search.balance import balanced_layers
from tests.sample import seeds


def partitions(num_layers: int, num_stages: int) -> list[tuple[int, ...]]:
    """Return all divisions of layers into stages with at least one layer."""
    ways = product(range(1, num_layers + 1), repeat=num_stages)
    return [way for way in ways if sum(way) == num_layers]


@pytest.mark.parametrize("seed", seeds(200))
def test_no_partition_within_the_memory_is_faster(seed: int) -> None:
    random = np.random.default_rng(seed)
    num_stages = int(random.integers(1, 5))
    num_layers = int(random.integers(num_stages, num_stages + 7))
    layer, extra = random.uniform(0.5, 2.0, num_stages), random.uniform(0.0, 5.0, num_stages)
    most = random.integers(0, num_layers + 1, num_stages).tolist()

    def seconds(stage: int, count: int) -> float:
        return float(layer[stage] * count + extra[stage])

    allowed = [way for way in partitions(num_layers, num_stages) if all(np.less_equal(way, most))]
    found = balanced_layers(num_layers, num_stages, seconds, most)
    if not allowed:
        assert found is None
        return
    assert found is not None
    assert tuple(found) in allowed
    slowest = [max(seconds(stage, count) for stage, count in enumerate(way)) for way in allowed]
    assert max(seconds(stage, count) for stage, count in enumerate(found)) == pytest.approx(min(slowest))
