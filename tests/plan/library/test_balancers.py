"""Balancers with the inputs and outputs of other frameworks: what they promise, and how equal their parts are."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from bytescale_ext.plan.cost.cost_model import CostModel
from bytescale_ext.plan.library.balancers import BalancedPacker, get_seqlen_balanced_partitions
from bytescale_ext.plan.library.partition import Limits, partition


def best_sum(work: list[int], num_parts: int, equal: bool) -> int:
    """Return the smallest possible sum of the fullest part, by brute force."""
    found = []
    for parts in product(range(num_parts), repeat=len(work)):
        counts = {parts.count(part) for part in range(num_parts)}
        if 0 not in counts and (not equal or len(counts) == 1):
            sums = [sum(one for one, part in zip(work, parts, strict=True) if part == index)
                    for index in range(num_parts)]  # fmt: skip
            found.append(max(sums))
    return min(found)


@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_parts_are_near_the_best(seed: int, equal: bool) -> None:
    work = np.random.default_rng(seed).integers(1, 100, 9).tolist()
    parts = get_seqlen_balanced_partitions(work, 3, equal)
    assert sorted(index for part in parts for index in part) == list(range(9))
    assert all(part == sorted(part) and part for part in parts)
    assert not equal or {len(part) for part in parts} == {3}
    assert max(sum(work[index] for index in part) for part in parts) <= 1.06 * best_sum(work, 3, equal)


def test_full_parts_hold_nothing_more() -> None:
    limits = Limits(2, 4, False, np.array([6, 5, 5, 5]), capacity=11)
    assert partition(np.ones(4), limits) is not None
    assert partition(np.ones(4), replace(limits, capacity=10)) is None


@pytest.mark.parametrize("equal", [False, True])
def test_parts_of_many_sequences_are_equal(equal: bool) -> None:
    work = np.random.default_rng(3).lognormal(8.0, 0.7, 512)
    sums = [work[part].sum() for part in get_seqlen_balanced_partitions(work.tolist(), 32, equal)]
    assert max(sums) / min(sums) < 1.001


def test_no_part_is_empty() -> None:
    assert sorted(get_seqlen_balanced_partitions([9, 0, 0], 3, False)) == [[0], [1], [2]]
    assert all(get_seqlen_balanced_partitions([0, 0, 0, 0], 4, True))


def test_impossible_parts_are_refused() -> None:
    with pytest.raises(ValueError, match="2 sequences for 3 parts"):
        get_seqlen_balanced_partitions([1, 2], 3, False)
    with pytest.raises(ValueError, match="3 sequences do not divide into 2 equal parts"):
        get_seqlen_balanced_partitions([1, 2, 3], 2, True)


@pytest.mark.parametrize("cost", [None, CostModel(a=1e-4, b=1.0)])
@pytest.mark.parametrize("mean", [1000, 7000])
def test_bins_hold_all_sequences_under_the_capacity(cost: CostModel | None, mean: int) -> None:
    lengths = np.random.default_rng(mean).integers(1, 2 * mean, 200).tolist()
    bins = BalancedPacker(16384, min_bin_count=16, bin_count_multiple=8, cost=cost).pack(lengths)
    assert len(bins) % 8 == 0
    assert len(bins) >= max(16, sum(lengths) / 16384)
    assert sorted(index for one in bins for index in one) == list(range(200))
    assert all(one and sum(lengths[index] for index in one) <= 16384 for one in bins)


def test_full_bins_fall_back_to_best_fit() -> None:
    assert BalancedPacker(10).pack([6, 6, 4, 4, 5, 5]) == [[0, 2], [1, 3], [4, 5]]
    assert len(BalancedPacker(10, min_bin_count=4).pack([6, 6, 4, 4, 5, 5])) == 4


def test_impossible_bins_are_refused() -> None:
    with pytest.raises(ValueError, match="2 sequences do not fill 4 bins"):
        BalancedPacker(10, bin_count_multiple=4).pack([1, 2])
    with pytest.raises(ValueError, match="more than a pack of 10 tokens holds"):
        BalancedPacker(10).pack([11])
    with pytest.raises(ValueError, match="give positive numbers"):
        BalancedPacker(0)
