from __future__ import annotations

import numpy as np
import pytest

from bytescale_ext.data.samples.epochs import EpochOrder


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
