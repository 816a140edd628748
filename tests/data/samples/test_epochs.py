from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bytescale_ext.data.samples.epochs import SHUFFLE_LIMIT, EpochOrder, KeyedOrder, sample_order


@pytest.mark.parametrize("num_rows", [1, 7, 100])
def test_each_epoch_has_every_row_once(num_rows: int) -> None:
    order = EpochOrder(num_rows, seed=3, split=0)
    for epoch in range(4):
        rows = [order.row(epoch * num_rows + place) for place in range(num_rows)]
        assert sorted(rows) == list(range(num_rows))


def test_epochs_seeds_and_splits_are_shuffled_apart() -> None:
    def epoch(seed: int, split: int, number: int) -> tuple[int, ...]:
        return tuple(EpochOrder(50, seed, split).rows(np.arange(50 * number, 50 * number + 50)).tolist())

    cases = [(1, 0, 0), (1, 0, 1), (2, 0, 0), (1, 1, 0), (0, 1, 1), (2**32 - 1, 0, 0)]
    assert len({epoch(*case) for case in cases}) == len(cases)
    assert epoch(-1, 0, 0) == epoch(2**32 - 1, 0, 0)  # RandomState takes no negative seed


def test_the_order_is_frozen() -> None:
    """Resumed runs meet the same samples: the stream of RandomState must not change, nor how it is seeded."""
    expected = np.arange(8)
    np.random.RandomState([4, 1, 0]).shuffle(expected)
    assert EpochOrder(8, 4, 0).rows(np.arange(8, 16)).tolist() == expected.tolist()


def test_long_epochs_have_a_keyed_order() -> None:
    assert isinstance(sample_order(SHUFFLE_LIMIT, 1, 0), EpochOrder)
    assert isinstance(sample_order(SHUFFLE_LIMIT + 1, 1, 0), KeyedOrder)
    assert isinstance(sample_order(0, 1, 0), EpochOrder)


@pytest.mark.slow
def test_a_keyed_order_has_every_row_once() -> None:
    for num_rows in range(1, 301):
        order = KeyedOrder(num_rows, seed=3, split=0)
        rows = order.rows(np.arange(2 * num_rows)).reshape(2, num_rows)
        assert (np.sort(rows) == np.arange(num_rows)).all(), num_rows
        assert [order.row(i) for i in range(2 * num_rows)] == rows.ravel().tolist()


@settings(max_examples=20, deadline=None)
@given(st.integers(301, 300_000), st.integers(-(2**40), 2**40), st.integers(0, 50))
def test_a_keyed_order_of_many_rows_has_every_row_once(num_rows: int, seed: int, epoch: int) -> None:
    rows = KeyedOrder(num_rows, seed, 1).rows(np.arange(num_rows) + epoch * num_rows)
    assert (np.bincount(rows, minlength=num_rows) == 1).all()


@pytest.mark.parametrize("num_rows", [10**9, 2**40 + 1, 2**61])
def test_rows_of_a_huge_keyed_order_are_those_of_single_samples(num_rows: int) -> None:
    order = KeyedOrder(num_rows, seed=7, split=2)
    samples = np.array([0, 1, num_rows - 1, num_rows, 2 * num_rows - 1])
    rows = order.rows(samples)
    assert rows.tolist() == [order.row(i) for i in samples.tolist()]
    assert len(set(rows.tolist())) >= len(samples) - 2
    assert 0 <= rows.min() <= rows.max() < num_rows


def test_a_keyed_order_looks_random() -> None:
    """Each window of samples has its share of each range of rows, and neighbours do not stay together."""
    num_rows, num_windows = 100_003, 100
    rows = KeyedOrder(num_rows, seed=5, split=0).rows(np.arange(num_rows))
    windows = rows[: num_rows // num_windows * num_windows].reshape(num_windows, -1) * 50 // num_rows
    counts = np.stack([np.bincount(window, minlength=50) for window in windows])
    expected = windows.shape[1] / 50
    assert 0.9 < ((counts - expected) ** 2 / expected).mean() < 1.1
    assert abs(np.corrcoef(np.arange(num_rows), rows)[0, 1]) < 0.02
    assert np.count_nonzero(np.diff(rows) == 1) < 10


def test_keyed_epochs_seeds_and_splits_are_shuffled_apart() -> None:
    cases = [(1, 0, 0), (1, 0, 1), (2, 0, 0), (1, 1, 0), (0, 1, 1), (2**32 - 1, 0, 0)]
    epochs = [KeyedOrder(5000, seed, split).rows(np.arange(5000) + 5000 * epoch) for seed, split, epoch in cases]
    for number, first in enumerate(epochs):
        for second in epochs[:number]:
            assert np.count_nonzero(first == second) < 20


def test_a_keyed_order_is_frozen() -> None:
    """A changed order would break resuming from checkpoints, so these rows must never change."""
    assert KeyedOrder(10**9, 1234, 0).rows(np.arange(3)).tolist() == [537603992, 668925001, 152155518]
    assert pickle.loads(pickle.dumps(KeyedOrder(10**9, 1234, 0))).row(0) == 537603992
