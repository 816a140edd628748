"""Embedding table with its optimizer, read and updated by rows: the server of HET (Miao et al. 2021).

The version of a row is the number of updates applied to it, from all workers together.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from typing import Final

import numpy as np
import numpy.typing as npt

EPSILON: Final = 1e-10
_BLOCK_ROWS: Final = 1 << 12  # rows that share a random generator


@dataclass(frozen=True, slots=True)
class Push:
    """Updates of some rows, sent by a worker.

    Attributes:
        rows: numbers of the rows, unique, int64 [n].
        gradients: gradient of a single update, or the sum of the Adagrad steps at rate 1 of several updates, each step
            taken after the worker's earlier updates; float32 [n, dim].
        updates: number of updates of each row, int64 [n].
        squares: sum over the updates of the mean square of the gradient, float32 [n].
    """

    rows: np.ndarray
    gradients: np.ndarray
    updates: np.ndarray
    squares: np.ndarray

    @classmethod
    def joined(cls, pushes: Sequence[Push]) -> Push:
        """Return the concatenation of several pushes."""
        return cls(
            np.concatenate([push.rows for push in pushes]),
            np.concatenate([push.gradients for push in pushes]),
            np.concatenate([push.updates for push in pushes]),
            np.concatenate([push.squares for push in pushes]),
        )


@dataclass(frozen=True, slots=True)
class Answer:
    """Requested rows that are missing or too old in the worker's cache.

    Attributes:
        asked: positions of the rows in the request, int64 [n].
        values: values of the rows, float32 [n, dim].
        squares: Adagrad sums of the rows, see ``RowTable``, float32 [n].
        versions: versions of the rows, int64 [n].
    """

    asked: np.ndarray
    values: np.ndarray
    squares: np.ndarray
    versions: np.ndarray

    @classmethod
    def empty(cls) -> Answer:
        """Return an answer without rows."""
        none = np.empty(0, np.int64)
        return cls(none, np.empty((0, 1), np.float32), np.empty(0, np.float32), none)

    def part(self, entries: np.ndarray, asked: np.ndarray) -> Answer:
        """Return the rows at indices ``entries``, int64 [k], with new positions ``asked``, int64 [k]."""
        return Answer(asked, self.values[entries], self.squares[entries], self.versions[entries])

    def joined(self, other: Answer) -> Answer:
        """Return the rows of two answers to the same request as one answer."""
        if not len(other.asked):
            return self
        names = (entry.name for entry in fields(self))
        return Answer(*(np.concatenate([getattr(self, name), getattr(other, name)]) for name in names))


@dataclass(eq=False, slots=True)
class RowTable:
    """Table of rows in host memory.

    Attributes:
        values: values of the rows, float32 [num_rows, dim].
        squares: sum over steps of the mean square of the row's gradient (row-wise Adagrad), float32 [num_rows].
        versions: version of each row, int64 [num_rows].
    """

    values: np.ndarray
    squares: np.ndarray
    versions: np.ndarray

    @classmethod
    def random(cls, rows: range, dim: int, deviation: float, seed: int) -> RowTable:
        """Return consecutive rows of a table of normally distributed values.

        The values of a row depend only on its number and the seed, not on the range.

        Args:
            rows: numbers of the rows, with a step of 1.
            dim: width of a row.
            deviation: standard deviation of the values.
            seed: seed of the table.
        """
        values = np.empty((len(rows), dim), np.float32)

        def draw(first: int) -> None:
            block = np.random.default_rng((seed, first)).standard_normal((_BLOCK_ROWS, dim), dtype=np.float32)
            begin, end = max(first, rows.start), min(first + _BLOCK_ROWS, rows.stop)
            part = block[begin - first : end - first]
            np.multiply(part, np.float32(deviation), out=values[begin - rows.start : end - rows.start])

        with ThreadPoolExecutor(os.cpu_count()) as threads:  # numpy releases the interpreter lock
            list(threads.map(draw, range(rows.start // _BLOCK_ROWS * _BLOCK_ROWS, rows.stop, _BLOCK_ROWS)))
        return cls(values, np.zeros(len(rows), np.float32), np.zeros(len(rows), np.int64))

    def answer(self, rows: np.ndarray, versions: np.ndarray, read_bound: int) -> Answer:
        """Return the rows that are more than ``read_bound`` updates newer than a worker's copies.

        Args:
            rows: numbers of the requested rows, int64 [n].
            versions: versions of the worker's copies, -1 without a copy, int64 [n].
            read_bound: largest number of updates that a copy may lack.
        """
        asked = np.flatnonzero((versions < 0) | (self.versions[rows] - versions > read_bound))
        answered = rows[asked]
        return Answer(asked, self.values[answered], self.squares[answered], self.versions[answered])

    def lacking(self, rows: np.ndarray, versions: np.ndarray, read_bound: int) -> int:
        """Return the number of updates that a worker's copies lack and keep lacking.

        Args:
            rows: numbers of the rows, int64 [n].
            versions: versions of the copies, -1 without a copy, int64 [n].
            read_bound: largest number of updates that a copy may lack.
        """
        lags = self.versions[rows] - versions
        return int(lags[(versions >= 0) & (lags <= read_bound)].sum())

    def apply(self, pushes: Sequence[Push], rate: float) -> None:
        """Update rows with the pushes of one step, summed in their order.

        If every worker pushes a single update of a row, the gradients are summed to one gradient. If a worker pushes
        several updates of a row, its steps were taken without the squares of the other workers. Then the steps of all
        workers are scaled down to the step size that includes these squares.
        """
        merged = Push.joined(pushes)
        rows, index = np.unique(merged.rows, return_inverse=True)
        most_updates, added = np.zeros(len(rows), np.int64), np.zeros(len(rows), np.float32)
        np.maximum.at(most_updates, index, merged.updates)
        np.add.at(added, index, merged.squares)
        has_steps = most_updates > 1
        parts = merged.gradients.copy()
        late = has_steps[index]
        before = self.squares[merged.rows[late]]
        parts[late] = as_steps(parts[late], merged.updates[late], before, merged.squares[late])
        parts[late] *= (_root(before + merged.squares[late]) / _root(before + added[index[late]]))[:, None]
        total = np.zeros((len(rows), self.values.shape[1]), np.float32)
        np.add.at(total, index, parts)
        self.squares[rows] += np.where(has_steps, added, mean_square(total))
        total[~has_steps] = adagrad_step(total[~has_steps], self.squares[rows[~has_steps]])
        self.values[rows] -= np.float32(rate) * total
        np.add.at(self.versions, merged.rows, merged.updates)


def mean_square(gradients: np.ndarray) -> np.ndarray:
    """Return the mean square [n] of each row's gradient [n, dim]."""
    squares: np.ndarray = np.mean(gradients * gradients, axis=1)
    return squares


def adagrad_step(gradients: np.ndarray, squares: np.ndarray) -> np.ndarray:
    """Return the steps of row-wise Adagrad at rate 1, [n, dim], which are subtracted from the rows.

    Adagrad (Duchi et al. 2011) with one sum of squares per row. A gradient of zeros gives a step of zeros.

    Args:
        gradients: gradients of the rows, [n, dim].
        squares: sums of squares that include these gradients, [n].
    """
    return gradients / _root(squares)[:, None]


def as_steps(gradients: np.ndarray, updates: np.ndarray, squares: np.ndarray, added: np.ndarray) -> np.ndarray:
    """Return pushed or pending updates as Adagrad steps at rate 1, [n, dim].

    Args:
        gradients: gradients or sums of steps, see ``Push``, [n, dim].
        updates: number of updates, [n].
        squares: sums of squares before these updates, [n].
        added: sums of squares of these updates, [n].
    """
    return np.where(updates[:, None] > 1, gradients, adagrad_step(gradients, squares + added))


def _root(squares: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    return np.sqrt(squares) + np.float32(EPSILON)
