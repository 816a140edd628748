"""Exchange of parts between full windows, so that windows become more related and stay as full as they were."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from bytescale_ext.plan.sculpt.pieces import Ints, Vectors

_CHOICES: Final = 8  # windows that are tried for a part
_LEAST_ROUNDS: Final = 12  # rounds of many windows, unless a round is not worth it
_MOST_ROUNDS: Final = 30
_PRODUCTS: Final = 1 << 27  # products of a part and a window beyond which there are only the least rounds
_LEAST: Final = 1e-3  # an exchange must raise the sum of lengths by this; smaller gains are rounding
_WORTH: Final = 3e-4  # rounds end when one of them raises the sum of lengths by less than this fraction
_BLOCK: Final = 1 << 23  # products that are computed together

Floats = npt.NDArray[np.float64]


def exchanged(window: Ints, lengths: Ints, vectors: Vectors, context: int) -> Ints:
    """Return better windows of parts by local search: [parts]. No window becomes empty, and no part is cut.

    A window is related if the sum of its vectors is long. In each round, a part that is more similar to another window
    than to its own moves there, or changes places with a part of that window, if both windows have the room and the
    two sums become longer together. Parts with the most to gain come first. Parts of ``context`` tokens stay: they
    fill a window. A round takes time for each pair of a part and a window, so few windows have more rounds.

    Args:
        window: window of each part, numbered from 0 without gaps; [parts].
        lengths: tokens of each part, [parts].
        vectors: unit vector of each part, or zeros; [parts, d].
        context: tokens of a window.
    """
    search = _Search(window, lengths, vectors, context)
    before = search.related()
    rounds = min(max(_PRODUCTS // (len(window) * len(search.room)), _LEAST_ROUNDS), _MOST_ROUNDS)
    for _ in range(rounds if len(search.room) > 1 else 0):
        search.round()
        after = search.related()
        if after - before < _WORTH * before:
            break
        before = after
    return search.window


class _Search:
    """State of the local search.

    Attributes:
        window: window of each part, [parts].
        room: free tokens of each window, [windows].
    """

    def __init__(self, window: Ints, lengths: Ints, vectors: Vectors, context: int) -> None:
        num_windows = int(window.max()) + 1
        self.window = window.copy()
        self.room = np.full(num_windows, context, dtype=np.int64)
        np.subtract.at(self.room, window, lengths)
        self._lengths, self._vectors = lengths, vectors
        self._shorter = np.flatnonzero(lengths < context)
        self._squares: Floats = np.einsum("pd,pd->p", vectors, vectors).astype(np.float64)
        self._sums = np.zeros((num_windows, vectors.shape[1]), dtype=np.float32)
        np.add.at(self._sums, window, vectors)
        order = np.argsort(window, kind="stable")
        self._members = np.split(order, np.cumsum(np.bincount(window))[:-1])

    def related(self) -> float:
        """Return the sum over windows of the length of the sum of their vectors."""
        return float(np.linalg.norm(self._sums, axis=1).sum())

    def round(self) -> None:
        """Try to place each part that is more similar to another window than to its own."""
        gain, choices = self._wishes()
        wishing = np.flatnonzero(gain > 0)
        for row in wishing[np.argsort(-gain[wishing], kind="stable")].tolist():
            part = int(self._shorter[row])
            home = int(self.window[part])
            windows = choices[row][choices[row] != home]
            if len(windows) and len(self._members[home]) > 1:
                self._place(part, windows)

    def _wishes(self) -> tuple[Vectors, Ints]:
        """Return the similarity to be gained by each shorter part, [n], and its most similar other windows, [n, c]."""
        num_parts, num_windows = len(self._shorter), len(self.room)
        norms = np.linalg.norm(self._sums, axis=1, keepdims=True)
        centres = np.divide(self._sums, norms, out=np.zeros_like(self._sums), where=norms > 0)
        num_choices = min(_CHOICES, num_windows - 1)
        choices = np.empty((num_parts, num_choices), dtype=np.int64)
        gain = np.empty(num_parts, dtype=np.float32)
        step = max(1, _BLOCK // num_windows)
        for start in range(0, num_parts, step):
            block, parts = slice(start, start + step), self._shorter[start : start + step]
            vectors, home = self._vectors[parts], self.window[parts]
            products = vectors @ centres.T
            products[np.arange(len(home)), home] = -np.inf
            choices[block] = np.argpartition(-products, num_choices - 1, axis=1)[:, :num_choices]
            others = self._sums[home] - vectors
            size = np.linalg.norm(others, axis=1)
            dots = np.einsum("pd,pd->p", others, vectors)
            gain[block] = products.max(axis=1) - np.divide(dots, size, out=np.zeros_like(size), where=size > 1e-6)
        return gain, choices

    def _place(self, part: int, windows: Ints) -> None:
        """Move a part to one of some windows, or exchange it with a part there, if that lengthens the sums."""
        home, length = int(self.window[part]), int(self._lengths[part])
        vector, sums = self._vectors[part], self._sums[windows]
        others = np.concatenate([self._members[number] for number in windows.tolist()])
        owner = np.repeat(np.arange(len(windows)), [len(self._members[number]) for number in windows.tolist()])
        products = (self._vectors[others] @ np.vstack([self._sums[home], vector, sums]).T).astype(np.float64)
        sum_products = (sums @ vector).astype(np.float64)
        square, squares = float(self._squares[part]), np.einsum("wd,wd->w", sums, sums).astype(np.float64)
        home_square = float(self._sums[home] @ self._sums[home])
        without = home_square + square - 2 * float(self._sums[home] @ vector)
        before = np.sqrt(home_square) + np.sqrt(squares)
        move = _root(np.array(without)) + _root(squares + square + 2 * sum_products) - before
        move[self.room[windows] < length] = -np.inf
        both = self._squares[others] - 2 * products[:, 1]
        here = without + both + 2 * products[:, 0]
        there = (squares + square + 2 * sum_products)[owner] + both - 2 * products[np.arange(len(others)), 2 + owner]
        swap = _root(here) + _root(there) - before[owner]
        longer = length - self._lengths[others]
        swap[(self.room[windows][owner] < longer) | (self.room[home] < -longer)] = -np.inf
        best_move, best_swap = int(move.argmax()), int(swap.argmax())
        if max(move[best_move], swap[best_swap]) < _LEAST:
            return
        if move[best_move] >= swap[best_swap]:
            self._move(part, int(windows[best_move]))
        else:
            self._move(part, int(windows[owner[best_swap]]))
            self._move(int(others[best_swap]), home)

    def _move(self, part: int, window: int) -> None:
        home = int(self.window[part])
        self.window[part] = window
        self._members[home] = self._members[home][self._members[home] != part]
        self._members[window] = np.append(self._members[window], part)
        self._sums[home] -= self._vectors[part]
        self._sums[window] += self._vectors[part]
        self.room[home] += self._lengths[part]
        self.room[window] -= self._lengths[part]


def _root(squares: Floats) -> Floats:
    roots: Floats = np.sqrt(np.maximum(squares, 0))
    return roots
