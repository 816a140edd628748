"""Tuples of integers that are stored as arrays."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from bytescale_ext.plan.step.numbers import Numbers


def test_numbers_are_the_tuple_of_the_same_integers() -> None:
    numbers, plain = Numbers(range(3, 9, 2)), (3, 5, 7)
    assert numbers == plain
    assert plain == numbers
    assert numbers == Numbers(plain)
    assert numbers != (3, 5)
    assert numbers != Numbers([3, 5, 8])
    assert numbers != [3, 5, 7]
    assert (len(numbers), numbers[1], numbers[-1], numbers[:2], tuple(numbers)) == (3, 5, 7, (3, 5), plain)
    assert type(numbers[0]) is int
    assert type(next(iter(numbers))) is int
    assert (hash(numbers), repr(numbers)) == (hash(plain), repr(plain))
    assert pickle.loads(pickle.dumps(numbers)) == plain
    with pytest.raises(IndexError):
        numbers[3]


def test_numpy_reads_numbers_without_a_copy_and_cannot_change_them() -> None:
    values = np.array([1, 2, 3])
    numbers = Numbers(values)
    assert np.shares_memory(np.asarray(numbers), values)
    assert np.array(numbers, dtype=np.float64).tolist() == [1.0, 2.0, 3.0]
    assert not np.shares_memory(np.array(numbers), values)
    with pytest.raises(ValueError, match="read-only"):
        numbers.array[0] = 5
    values[0] = 7  # the array of the caller stays writable
