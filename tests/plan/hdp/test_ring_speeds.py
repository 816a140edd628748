"""Shares of rings of unlike ranks."""

from __future__ import annotations

import numpy as np
import pytest

from bytescale_ext.plan.hdp.ring_speeds import RingSpeeds, proportional_shares
from bytescale_ext.plan.step.sizes import Cluster


@pytest.mark.parametrize("shares", [(), (7, 3)])
def test_shares_of_a_ring(shares: tuple[int, ...]) -> None:
    speeds = np.array([1.0, 0.5]) if shares else np.ones(2)
    assert proportional_shares(10, speeds, 8) == shares
    assert proportional_shares(20, speeds, 10) == (), "both ranks are full"


def test_uneven_shares_use_each_rank_and_no_rank_beyond_c() -> None:
    random = np.random.default_rng(6)
    for _ in range(300):
        width, most = int(random.integers(2, 12)), int(random.integers(1, 50))
        length, speeds = int(random.integers(width, width * most + 1)), random.choice([0.3, 0.7, 1.0, 1.4], width)
        shares = np.array(proportional_shares(length, speeds, most))
        if len(shares):
            assert (shares.sum(), shares.min() >= 1, shares.max() <= most) == (length, True, True)
            assert (shares / speeds).max() <= 0.98 * length / width / speeds.min()


def test_speeds_of_rings() -> None:
    """A ring is as fast as its shares allow. Even rings are as slow as their slowest rank."""
    cluster = Cluster(4, 8, speeds=(1.0, 0.5, 1.0, 1.0))
    even, uneven = (RingSpeeds(cluster, is_uneven) for is_uneven in (False, True))
    assert (even.shares(0, 2, 10), uneven.shares(0, 2, 10)) == ((), (7, 3))
    assert (even.speed(0, 2, 10), uneven.speed(0, 2, 10)) == (0.5, 5 / 7)
    assert uneven.speed(2, 2, 10) == 1.0
    for rings in (even, uneven):
        firsts = np.arange(3)
        assert rings.speeds(firsts, 2, 10).tolist() == [rings.speed(first, 2, 10) for first in range(3)]
