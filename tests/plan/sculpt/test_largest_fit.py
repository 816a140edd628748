"""Both greedy fits, on cases computed by hand, and against a slow best fit."""

from __future__ import annotations

import numpy as np
import pytest

from bytescale_ext.plan.sculpt.largest_fit import OpenWindows, best_fit, largest_fit

EAST, NORTH = (1.0, 0.0), (0.0, 1.0)


def fit(lengths: list[int], vectors: list[tuple[float, float]], overflow: str = "none") -> tuple[list[int], list[int]]:
    window, taken = largest_fit(np.array(lengths), np.array(vectors, dtype=np.float32), 10, overflow)
    return window.tolist(), taken.tolist()


def test_long_pieces_open_windows_and_short_ones_join_what_they_are_like() -> None:
    assert fit([6, 6, 4, 4], [EAST, NORTH, NORTH, EAST]) == ([0, 1, 1, 0], [6, 6, 4, 4])


def test_room_counts_as_much_as_likeness() -> None:
    both = (0.8, 0.6)  # similarity 0.8 to the window that EAST has opened, 0.6 to the window of NORTH
    window, _ = fit([7, 3, 1, *[1] * 9], [EAST, NORTH, both, *[EAST] * 9])
    assert window[:3] == [0, 1, 1]  # 0.8 x 3 tokens of room against 0.6 x 7
    window, _ = fit([7, 7, 1, *[1] * 5], [EAST, NORTH, both, *[EAST] * 5])
    assert window[:3] == [0, 1, 0]  # 0.8 x 3 against 0.6 x 3


def test_a_piece_that_fits_nowhere_is_left_over() -> None:
    assert fit([7, 7, 6], [EAST, EAST, EAST]) == ([0, 1, -1], [7, 7, 0])


@pytest.mark.parametrize("overflow", ["truncate", "split"])
def test_an_end_may_remain(overflow: str) -> None:
    assert fit([7, 7, 6], [EAST, EAST, EAST], overflow) == ([0, 1, 0], [7, 7, 3])


def test_full_windows_take_nothing_more() -> None:
    assert fit([10, 5, 4], [EAST] * 3, "split") == ([0, -1, -1], [10, 0, 0])


def test_pieces_too_few_for_a_window_are_left_over() -> None:
    assert fit([5, 4], [EAST, NORTH]) == ([-1, -1], [0, 0])


def fit_best(lengths: list[int], room: list[int], context: int, vectors: np.ndarray | None = None) -> list[int]:
    """Return the windows by best fit. Open windows contain EAST, except the last window, which contains NORTH."""
    sums = np.array([*[EAST] * (len(room) - 1), NORTH][: len(room)], dtype=np.float32).reshape(-1, 2)
    windows = OpenWindows(context, np.array(room, dtype=np.int64), sums)
    if vectors is None:
        return best_fit(np.array(lengths), np.array([EAST] * len(lengths)).reshape(-1, 2), windows).tolist()
    return best_fit(np.array(lengths), vectors, windows, choices=2).tolist()


def test_best_fit_takes_the_least_room_that_suffices() -> None:
    assert fit_best([4, 6, 3], [7, 5, 0], 10) == [1, 0, 3]
    assert fit_best([10, 10], [], 10) == [0, 1]
    assert fit_best([], [3], 10) == []


def test_best_fit_may_choose_the_most_similar_of_several() -> None:
    assert fit_best([2], [3, 4, 9, 5], 10, np.array([EAST])) == [0]
    assert fit_best([2], [3, 9, 9, 4], 10, np.array([NORTH])) == [3]
    assert fit_best([2], [3, 4, 9, 5], 10, np.array([NORTH])) == [0]  # only the two fullest windows are compared
    assert fit_best([9, 1], [1, 1], 10, np.array([NORTH, NORTH])) == [2, 1]


def slow_best_fit(lengths: list[int], room: list[int], context: int) -> list[int]:
    window = [-1] * len(lengths)
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fitting = [number for number, left in enumerate(room) if left >= lengths[i]]
        if not fitting:
            room.append(context)
            fitting = [len(room) - 1]
        window[i] = min(fitting, key=lambda number: (room[number], number))
        room[window[i]] -= lengths[i]
    return window


@pytest.mark.parametrize("seed", range(5))
def test_best_fit_equals_a_slow_one(seed: int) -> None:
    random = np.random.RandomState(seed)
    lengths, room = random.randint(1, 51, 200).tolist(), random.randint(0, 51, 20).tolist()
    assert fit_best(lengths, room, 50) == slow_best_fit(lengths, room, 50)


@pytest.mark.parametrize("overflow", ["none", "truncate", "split"])
def test_pieces_of_a_whole_window_come_first(overflow: str) -> None:
    lengths, vectors = [4, 10, 6, 10, 4], [EAST, NORTH, EAST, EAST, NORTH]
    assert fit(lengths, vectors, overflow) == ([2, 0, 2, 1, -1], [4, 10, 6, 10, 0])
