"""Pools cover all ranks and all rings; no pool mixes fast and slow ranks if the longest ring fits in one."""

from __future__ import annotations

import numpy as np
import pytest

from bytescale_ext.plan.hdp.aligned.pools import ALL, FAST, POOLS, fast_speed, groups_of, pools_of, runs_of
from bytescale_ext.plan.hdp.aligned.shelves import EmptySpan, RingWork
from bytescale_ext.plan.step.sizes import Cluster

ONE = (1.0,) * 5 + (0.5,) + (1.0,) * 10
HALF = (1.0,) * 8 + (0.5,) * 8


def work_of(speeds: tuple[float, ...], *min_widths: int) -> RingWork:
    """Return rings of these least widths, as long as they are wide."""
    widths = np.array(min_widths, dtype=np.int64)
    return RingWork(
        100 * widths, widths.astype(np.float64), widths, widths, Cluster(len(speeds), 100, 8, speeds=speeds)
    )


def test_rings_stay_on_fast_ranks() -> None:
    spans = [pool.span for pool in pools_of(work_of(ONE, 4, 3, 2, 2, 2), FAST)]
    assert spans == [EmptySpan(8, 16, 0, 1), EmptySpan(0, 5, 1, 4), EmptySpan(6, 8, 4, 5), EmptySpan(5, 6, 5, 5)]


def test_slow_nodes_take_rings_in_proportion() -> None:
    fast, slow = pools_of(work_of(HALF, 4, 2, 2, 2, 2), ALL)
    assert (fast.span, fast.speed) == (EmptySpan(0, 8, 0, 3), 1.0)
    assert (slow.span, slow.speed) == (EmptySpan(8, 16, 3, 5), 0.5)


@pytest.mark.parametrize("slow", [0.502, 0.7, 0.85])
def test_ranks_of_unlike_speeds_share_no_pool(slow: float) -> None:
    """All of them together are worth more than the fast ranks, but a ring is as slow as its slowest rank."""
    speeds = (1.0,) * 4 + (0.98,) * 4 + (slow,) * 8
    assert fast_speed(np.array(speeds)) == slow
    fast, others = pools_of(work_of(speeds, 4, 2, 2, 2, 2), ALL)
    assert ((fast.span.first, fast.span.stop), fast.speed) == ((0, 8), 0.98)
    assert ((others.span.first, others.span.stop), others.speed) == ((8, 16), slow)
    assert len(pools_of(work_of(speeds, 4, 2, 2, 2, 2), FAST)) == 1


def test_groups_of_alike_speeds() -> None:
    assert groups_of(np.array([1.0, 0.91, 0.9, 0.89, 0.5, 0.46, 0.44])).tolist() == [0, 0, 0, 1, 2, 2, 3]


def test_a_ring_that_fits_in_no_run_uses_all_ranks() -> None:
    (pool,) = pools_of(work_of(ONE, 9, 2), FAST)
    assert (pool.span, pool.speed) == (EmptySpan(0, 16, 0, 2), 0.5)


@pytest.mark.parametrize("ranks", POOLS)
def test_pools_cover_ranks_and_rings(ranks: str) -> None:
    random = np.random.default_rng(0)
    for _ in range(100):
        speeds = tuple(random.choice([0.5, 0.8, 1.0], 24, p=[0.1, 0.1, 0.8]).tolist())
        min_widths = np.sort(random.integers(1, 9, random.integers(0, 12)))[::-1].tolist()
        work = work_of(speeds, *min_widths)
        spans = [pool.span for pool in pools_of(work, ranks)]
        assert sorted(rank for span in spans for rank in range(span.first, span.stop)) == list(range(24))
        rings = [(ring, span) for span in spans for ring in range(span.begin, span.end)]
        assert [ring for ring, _ in rings] == list(range(len(min_widths)))
        assert all(min_widths[ring] <= span.stop - span.first for ring, span in rings)


def test_fast_ranks() -> None:
    assert fast_speed(np.array(HALF)) == fast_speed(np.array(ONE)) == 1.0
    assert fast_speed(np.array([1.0, 0.95, 0.95, 0.95])) == 0.95
    assert runs_of(Cluster(16, 100, 8, speeds=ONE), np.array(ONE).astype(int)) == [(0, 5), (5, 6), (6, 8), (8, 16)]
