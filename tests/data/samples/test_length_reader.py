"""Lengths that another process reads; data sets with readers are in tests/bytescale/core/datasets."""

from __future__ import annotations

import pickle

import numpy as np

from bytescale_ext.data.samples.length_reader import StepLengths, lengths_in_blend
from bytescale_ext.plan.step.numbers import Numbers


class Tens:
    """Reader whose samples have ten tokens more than their numbers."""

    def lengths(self, samples: np.ndarray) -> np.ndarray:
        lengths: np.ndarray = samples + 10
        return lengths


def test_lengths_are_read_when_they_are_asked_for() -> None:
    lengths = pickle.loads(pickle.dumps(StepLengths(Tens(), range(3, 7))))
    assert len(lengths) == 4
    assert not lengths.is_read
    assert tuple(lengths) == (13, 14, 15, 16)
    assert lengths.is_read
    assert (lengths[1], lengths[2:]) == (14, (15, 16))
    assert np.asarray(lengths).tolist() == [13, 14, 15, 16]


def test_consecutive_numbers_are_pickled_as_a_range() -> None:
    numbers = Numbers(range(10**6, 2 * 10**6))
    stored = pickle.dumps(numbers)
    assert len(stored) < 200
    assert pickle.loads(stored) == numbers


def test_samples_of_a_blend() -> None:
    datasets, inner = np.array([0, 1, 0, 1]), np.array([0, 0, 1, 1])
    assert lengths_in_blend([Tens(), Tens()], datasets, inner, np.array([3, 0])).tolist() == [11, 10]
