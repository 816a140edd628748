"""Shelves: rings side by side at one height, in disjoint spans."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from bytescale_ext.plan.hdp.aligned.shelves import EmptySpan, RingWork, _level_widths, fill_shelves, split_ranks
from bytescale_ext.plan.step.sizes import Cluster


def ring_work(lengths: list[int], capacity: int, most: int, node: int = 64) -> RingWork:
    """Return rings of at most ``most`` ranks on 64 ranks."""
    sizes = np.array(lengths, dtype=np.int64)
    least = -(-sizes // capacity)
    work = sizes * (0.01 * sizes + 1.0)
    return RingWork(sizes, work, least, np.minimum(2 * least, most), Cluster(64, capacity, node))


@pytest.mark.parametrize("node", [4, 7, 64])
def test_shelves_hold_each_ring_once_and_side_by_side(node: int) -> None:
    lengths = sorted(np.random.default_rng(0).integers(65, 1500, 80).tolist(), reverse=True)
    work = ring_work(lengths, 64, 32, node)
    span = fill_shelves(work, EmptySpan(8, 40, 0, 80), 3000.0)
    assert sorted(ring for shelf in span.shelves for ring in shelf.rings.tolist()) == list(range(80))
    for shelf in span.shelves:
        in_order = np.argsort(shelf.first_ranks)
        ends = (shelf.first_ranks + shelf.widths)[in_order]
        assert (shelf.first_ranks[in_order][1:] >= ends[:-1]).all()
        assert shelf.first_ranks.min() >= 8
        assert ends[-1] <= 40
        assert (shelf.widths >= work.min_widths[shelf.rings]).all()


def test_regions_are_apart_and_the_longest_come_first() -> None:
    work = ring_work([1500, 1400, *[200] * 60], 64, 64, node=8)
    cuts = split_ranks(work, EmptySpan(0, 64, 0, 62), height=2000.0, budget=2500.0, peak=0.5, max_spans=4)
    assert len(cuts) > 1
    assert (cuts[0].first, cuts[0].begin) == (0, 0)
    assert (cuts[-1].stop, cuts[-1].end) == (64, 62)
    for one, other in itertools.pairwise(cuts):
        assert (one.stop, one.end) == (other.first, other.begin)
        assert one.stop % 8 == 0


@pytest.mark.slow
def test_the_lowest_shelf_that_holds_its_rings() -> None:
    """Shelves are as low as any of 256 heights allows, with rings of different heights due to memory or exchange."""
    random = np.random.default_rng(3)
    for node in (8, 64):
        for _ in range(30):
            work = ring_work(sorted(random.integers(65, 1500, 12).tolist(), reverse=True), 64, 32, node)
            rings, height = np.arange(12), float(random.uniform(2000, 8000))
            found = _level_widths(work, rings, height, 64)
            fitting = [
                widths.tolist()
                for share in range(1, 256)
                if (widths := work.widths(rings, height * share / 256, 64)).sum() <= 64
            ]
            assert (found is None) == (not fitting)
            assert found is None or found.tolist() == fitting[0]
