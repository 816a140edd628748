from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bytescale_ext.plan.cost.cost_model import CostModel
from bytescale_ext.plan.hdp.free.nested_rings import nest_rings, target_widths
from bytescale_ext.plan.hdp.problem import Problem
from bytescale_ext.plan.step.sizes import Cluster
from tests.plan.hdp.problems import problem
from tests.sample import examples

COST = CostModel(a=1e-3, b=0.1, c=0.05, g=0.5)


def step(lengths: list[int], num_ranks: int, cost: CostModel) -> Problem:
    """Return a problem with enough memory for any sequence on one rank."""
    return problem(ints(lengths), np.ones(len(lengths), dtype=np.int64), Cluster(num_ranks, 1), cost)


def ints(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int64)


@settings(max_examples=examples(200), deadline=None)
@given(
    st.integers(1, 2000),
    st.integers(1, 40),
    st.floats(0.5, 500.0),
    st.just(0.0) | st.floats(1e-3, 0.3),
    st.just(0.0) | st.floats(1e-3, 0.09),
    st.just(0.0) | st.floats(1e-3, 5.0),
)
def test_target_widths_are_the_fewest_that_are_fast_enough(
    length: int, most: int, target: float, c: float, h: float, m: float
) -> None:
    cost = CostModel(a=1e-3, b=0.1, c=c, g=0.3, h=h, m=m)
    width = int(target_widths(step([length], most, cost), target)[0])
    times = {other: cost.sequence_cost(length, other) + cost.g for other in range(1, min(most, length) + 1)}
    fast = [other for other, seconds in times.items() if seconds <= target * (1 + 1e-9)]
    if fast:
        assert width in (min(fast), min(fast) + 1)  # rounding of a quotient may cost one rank
        assert times[width] <= target * (1 + 1e-9)
    elif not m:  # with m, which makes wide rings slow, several widths have about the same time
        hidden = int(cost.a * length / (c - h)) + 1 if c > h else most
        at_most = min(most, length)  # if overlap ends at a whole number of ranks, rounding may cost one rank
        assert width == at_most or abs(width - min(hidden, at_most)) <= 1


def test_no_sequence_gets_more_ranks_than_a_longer_one() -> None:
    lengths = np.arange(3000, 1, -7)
    for target in (1.0, 30.0, 150.0, 160.0, 500.0):
        widths = target_widths(step(lengths.tolist(), 64, COST), target)
        assert (np.diff(widths) <= 0).all()


@settings(max_examples=examples(150), deadline=None)
@given(st.data())
def test_rings_never_wait(data: st.DataObject) -> None:
    """All ranks of a ring are ready at the same time, so loads are sums without idle time."""
    num_ranks, node = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 45))
    needs = sorted(data.draw(st.lists(st.integers(1, num_ranks), max_size=30)), reverse=True)
    lengths = [50 * need for need in needs]
    rings = nest_rings(ints(lengths), ints(needs), Cluster(num_ranks, 1, node), COST)
    ready = np.zeros(num_ranks)
    for length, need, first, width in zip(lengths, needs, rings.first_ranks, rings.widths, strict=True):
        assert need <= width
        assert first + width <= num_ranks
        window = ready[first : first + width]
        assert window.min() == window.max()
        window += COST.sequence_cost(length, int(width)) + COST.g
        if width <= node:
            assert first // node == (first + width - 1) // node
        else:
            assert first % node == 0
    np.testing.assert_allclose(rings.loads, ready)


def test_a_run_is_not_taken_whole_when_the_exchange_would_show() -> None:
    hidden, shown = CostModel(a=1.0, b=1.0), CostModel(a=1.0, b=1.0, c=50.0)
    assert nest_rings(ints([100]), ints([5]), Cluster(8, 1), hidden).widths.tolist() == [8]
    assert nest_rings(ints([100]), ints([5]), Cluster(8, 1), shown).widths.tolist() == [5]


@pytest.mark.parametrize("node", [5, 8, 64])
def test_wide_rings_are_whole_nodes(node: int) -> None:
    rings = nest_rings(ints([5000, 4000, 3000, 50]), ints([20, 17, 9, 2]), Cluster(64, 1, node), COST)
    wide = rings.widths > node
    assert (rings.first_ranks[wide] % node == 0).all()
    assert (
        (rings.first_ranks + rings.widths)[wide] % node * ((rings.first_ranks + rings.widths)[wide] < 64) == 0
    ).all()


@settings(max_examples=examples(150), deadline=None)
@given(st.lists(st.integers(1, 24), min_size=1, max_size=60), st.integers(24, 40))
def test_each_ring_takes_the_run_that_is_ready_first(needs: list[int], num_ranks: int) -> None:
    """The search over all runs, which takes quadratic time, finds the same ranks."""
    needs = sorted(needs, reverse=True)
    lengths = [50 * need for need in needs]
    rings = nest_rings(ints(lengths), ints(needs), Cluster(num_ranks, 1), COST)
    runs = [(0.0, 0, num_ranks)]
    for length, need, first, width in zip(
        lengths, needs, rings.first_ranks.tolist(), rings.widths.tolist(), strict=True
    ):
        load, start, size = min(run for run in runs if run[2] >= need)
        assert first == start
        runs.remove((load, start, size))
        ends = sorted({*_part_ends(start, size, need), start + width})
        runs += [(load, low, high - low) for low, high in itertools.pairwise(ends) if low != start]
        runs.append((load + COST.sequence_cost(length, width) + COST.g, start, width))


def _part_ends(first: int, width: int, need: int) -> list[int]:
    count = width // need
    return [first + part * width // count for part in range(count + 1)]
