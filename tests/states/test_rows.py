"""The table of rows: Adagrad row by row, and versions that count updates."""

from __future__ import annotations

import math

import numpy as np
import pytest

from bytescale_ext.states.rows import Push, RowTable, adagrad


def push(rows: list[int], gradients: list[list[float]], updates: list[int]) -> Push:
    return Push(np.array(rows, np.int64), np.array(gradients, np.float32), np.array(updates, np.int64))


def test_adagrad_by_hand() -> None:
    values, squares = np.array([[1.0, 2.0]], np.float32), np.array([0.5], np.float32)
    new, new_squares = adagrad(values, squares, np.array([[3.0, -1.0]], np.float32), 0.1)
    assert new_squares == pytest.approx([0.5 + (9 + 1) / 2])
    step = 0.1 / math.sqrt(5.5)
    assert new[0] == pytest.approx([1 - 3 * step, 2 + step], rel=1e-6)
    assert new.dtype == new_squares.dtype == np.float32


def test_a_gradient_of_zeros_changes_nothing() -> None:
    values = np.array([[1.0, -2.0], [3.0, 4.0]], np.float32)
    for squares in (np.zeros(2, np.float32), np.ones(2, np.float32)):
        new, new_squares = adagrad(values, squares, np.zeros((2, 2), np.float32), 0.1)
        assert (new == values).all()
        assert (new_squares == squares).all()


def test_pushes_of_a_step_are_summed_before_the_update() -> None:
    table, expected = RowTable.drawn(range(6), 2, 1.0, 3), RowTable.drawn(range(6), 2, 1.0, 3)
    table.apply([push([1, 4], [[1, 2], [3, 4]], [1, 2]), push([4, 0], [[-1, 0], [5, 6]], [1, 3])], 0.1)
    sums = np.array([[5, 6], [1, 2], [2, 4]], np.float32)
    rows = [0, 1, 4]
    expected.values[rows], expected.squares[rows] = adagrad(expected.values[rows], expected.squares[rows], sums, 0.1)
    assert (table.values == expected.values).all()
    assert (table.squares == expected.squares).all()
    assert table.versions.tolist() == [3, 1, 0, 0, 3, 0]


def test_only_copies_that_are_too_old_are_sent() -> None:
    table = RowTable.drawn(range(5), 3, 1.0, 0)
    table.versions[:] = [0, 4, 4, 4, 9]
    rows, versions = np.array([4, 1, 2, 3, 0]), np.array([9, 4, 2, 1, -1])
    answer = table.answer(rows, versions, 2)
    assert answer.asked.tolist() == [3, 4]
    assert answer.versions.tolist() == [4, 0]
    assert (answer.values == table.values[[3, 0]]).all()
    assert (answer.squares == 0).all()
    assert table.answer(rows, versions, 0).asked.tolist() == [2, 3, 4]


def test_a_table_is_drawn_by_its_seed() -> None:
    one, other = RowTable.drawn(range(2000), 8, 0.02, 1), RowTable.drawn(range(2000), 8, 0.02, 2)
    assert (one.values == RowTable.drawn(range(2000), 8, 0.02, 1).values).all()
    assert (one.values != other.values).any()
    assert float(one.values.std()) == pytest.approx(0.02, rel=0.05)
    assert not one.squares.any()
    assert not one.versions.any()


def test_joined_pushes_keep_their_order() -> None:
    joined = Push.joined([push([2], [[1, 1]], [1]), push([0, 1], [[2, 2], [3, 3]], [2, 3])])
    assert joined.rows.tolist() == [2, 0, 1]
    assert joined.gradients[:, 0].tolist() == [1, 2, 3]
    assert joined.updates.tolist() == [1, 2, 3]
