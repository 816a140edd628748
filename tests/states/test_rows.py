"""Table of rows: Adagrad row by row, and versions that count updates."""

from __future__ import annotations

import math

import numpy as np
import pytest

from bytescale_ext.states.rows import Push, RowTable, adagrad_step, mean_square


def push(rows: list[int], gradients: list[list[float]], updates: list[int], squares: list[float]) -> Push:
    floats = (np.array(one, np.float32) for one in (gradients, squares))
    return Push(np.array(rows, np.int64), next(floats), np.array(updates, np.int64), next(floats))


def test_adagrad_by_hand() -> None:
    gradients = np.array([[3.0, -1.0]], np.float32)
    assert mean_square(gradients) == pytest.approx([(9 + 1) / 2])
    step = adagrad_step(gradients, 0.5 + mean_square(gradients))
    assert step[0] == pytest.approx([3 / math.sqrt(5.5), -1 / math.sqrt(5.5)], rel=1e-6)
    assert step.dtype == np.float32


def test_pushes_of_a_step_are_summed_before_the_update() -> None:
    table = RowTable.random(range(6), 2, 1.0, 3)
    before = table.values.copy()
    of_workers = push([1, 4], [[1, 2], [3, 4]], [1, 1], [2.5, 12.5]), push([4, 0], [[-1, 0], [5, 6]], [1, 3], [0.5, 40])
    table.apply(of_workers, 0.1)
    assert table.squares.tolist() == [40, 2.5, 0, 0, 10, 0]  # three pending updates; one update; the square of a sum
    moved = (before - table.values) / 0.1
    expected = np.zeros((6, 2))
    expected[[0, 1, 4]] = [[5, 6], [1 / 2.5**0.5, 2 / 2.5**0.5], [2 / 10**0.5, 4 / 10**0.5]]
    assert moved == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert table.versions.tolist() == [3, 1, 0, 0, 2, 0]


@pytest.mark.parametrize("updates", [1, 3])
def test_a_worker_that_waited_is_shortened_by_the_squares_of_the_others(updates: int) -> None:
    """Its three steps, or its single gradient of 2, count next to ten updates of another worker with squares of 32."""
    table = RowTable.random(range(1), 2, 1.0, 3)
    before = table.values.copy()
    mine = push([0], [[2, 2]], [updates], [4.0])
    table.apply([mine, push([0], [[0, 0]], [10], [32.0])], 0.1)
    step = 2.0 if updates == 3 else 1.0
    assert (before - table.values)[0] == pytest.approx(2 * [0.1 * step * math.sqrt(4 / 36)], rel=1e-5)
    assert table.squares.tolist() == [36]
    assert table.versions.tolist() == [10 + updates]


def test_only_copies_that_are_too_old_are_sent() -> None:
    table = RowTable.random(range(5), 3, 1.0, 0)
    table.versions[:] = [0, 4, 4, 4, 9]
    rows, versions = np.array([4, 1, 2, 3, 0]), np.array([9, 4, 2, 1, -1])
    answer = table.answer(rows, versions, 2)
    assert answer.asked.tolist() == [3, 4]
    assert answer.versions.tolist() == [4, 0]
    assert (answer.values == table.values[[3, 0]]).all()
    assert (answer.squares == 0).all()
    assert table.answer(rows, versions, 0).asked.tolist() == [2, 3, 4]
    assert [table.lacking(rows, versions, bound) for bound in (0, 2, 3)] == [0, 2, 5]
