"""The table of rows: Adagrad row by row, and versions that count updates."""

from __future__ import annotations

import math

import numpy as np
import pytest

from bytescale_ext.states.rows import Push, RowTable, adagrad, mean_square


def push(rows: list[int], gradients: list[list[float]], updates: list[int], squares: list[float]) -> Push:
    floats = (np.array(one, np.float32) for one in (gradients, squares))
    return Push(np.array(rows, np.int64), next(floats), np.array(updates, np.int64), next(floats))


def test_adagrad_by_hand() -> None:
    values, squares = np.array([[1.0, 2.0]], np.float32), np.array([0.5], np.float32)
    gradients = np.array([[3.0, -1.0]], np.float32)
    new, new_squares = adagrad(values, squares, gradients, mean_square(gradients), 0.1)
    assert new_squares == pytest.approx([0.5 + (9 + 1) / 2])
    step = 0.1 / math.sqrt(5.5)
    assert new[0] == pytest.approx([1 - 3 * step, 2 + step], rel=1e-6)
    assert new.dtype == new_squares.dtype == np.float32


def test_a_gradient_of_zeros_changes_nothing() -> None:
    values = np.array([[1.0, -2.0], [3.0, 4.0]], np.float32)
    for squares in (np.zeros(2, np.float32), np.ones(2, np.float32)):
        new, new_squares = adagrad(values, squares, np.zeros((2, 2), np.float32), np.zeros(2, np.float32), 0.1)
        assert (new == values).all()
        assert (new_squares == squares).all()


def test_pushes_of_a_step_are_summed_before_the_update() -> None:
    table, expected = RowTable.drawn(range(6), 2, 1.0, 3), RowTable.drawn(range(6), 2, 1.0, 3)
    of_workers = push([1, 4], [[1, 2], [3, 4]], [1, 1], [2.5, 12.5]), push([4, 0], [[-1, 0], [5, 6]], [1, 3], [0.5, 40])
    table.apply(of_workers, 0.1)
    sums = np.array([[5, 6], [1, 2], [2, 4]], np.float32)
    added = np.array([40, 2.5, 10], np.float32)  # three that have waited; one; and the square of the sum of two
    rows = [0, 1, 4]
    expected.values[rows], expected.squares[rows] = adagrad(
        expected.values[rows], expected.squares[rows], sums, added, 0.1
    )
    assert (table.values == expected.values).all()
    assert (table.squares == expected.squares).all()
    assert table.versions.tolist() == [3, 1, 0, 0, 2, 0]


def test_updates_that_have_waited_move_a_row_about_as_far_as_one_by_one() -> None:
    """Ten equal gradients: the sum of steps is twice that of waiting; as one gradient it would be five times."""
    ones, tables = np.ones((1, 4)).tolist(), [RowTable.drawn(range(1), 4, 1.0, 3) for _ in range(3)]
    before = tables[0].values.copy()
    for _ in range(10):
        tables[0].apply([push([0], ones, [1], [1.0])], 0.1)
    tables[1].apply([push([0], (10 * np.ones((1, 4))).tolist(), [10], [10.0])], 0.1)
    tables[2].apply([push([0], (10 * np.ones((1, 4))).tolist(), [1], [100.0])], 0.1)
    moved = [float((before - table.values).mean()) for table in tables]
    assert moved == pytest.approx([0.1 * sum(n**-0.5 for n in range(1, 11)), 0.1 * 10**0.5, 0.1], rel=1e-5)
    assert tables[0].squares == tables[1].squares


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
    joined = Push.joined([push([2], [[1, 1]], [1], [1]), push([0, 1], [[2, 2], [3, 3]], [2, 3], [8, 27])])
    assert joined.rows.tolist() == [2, 0, 1]
    assert joined.gradients[:, 0].tolist() == [1, 2, 3]
    assert joined.updates.tolist() == [1, 2, 3]
    assert joined.squares.tolist() == [1, 8, 27]
