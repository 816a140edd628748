from __future__ import annotations

import numpy as np
import pytest

from bytescale_ext.plan.evaluate.replay import StageReplay
from bytescale_ext.plan.setup.forecast import coupling


def replayed(num_stages: int, *ranks: list[float]) -> StageReplay:
    """Return a replay with slots of these seconds on each rank, equally long on all stages and in both passes."""
    seconds = np.repeat(np.array([slot / 2 for rank in ranks for slot in rank]), 2 * num_stages)
    stops = seconds.reshape(-1, 2, num_stages)
    counts = np.array([len(rank) for rank in ranks])
    return StageReplay(num_stages, counts, np.zeros_like(stops), stops, stops, np.zeros_like(stops))


@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_slot_takes_as_long_as_its_slowest_rank(num_stages: int) -> None:
    uneven = replayed(num_stages, [3.0, 1.0], [1.0, 3.0], [2.0], [2.0])
    assert coupling(uneven, 1, 2) == pytest.approx(6.0 / 4.0)
    assert coupling(uneven, 1, 1) == 1.0
    even = replayed(num_stages, [3.0, 1.0], [3.0, 1.0])
    assert coupling(even, 1, 2) == 1.0
