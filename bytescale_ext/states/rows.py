"""A table of embeddings with its optimizer beside it, read and updated by rows: the server of HET (Miao et al. 2021).

The version of a row is the number of updates that it has taken, from all workers together.
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
_DRAWN: Final = 1 << 12  # rows that are drawn together


@dataclass(frozen=True, slots=True)
class Push:
    """What one worker sends for some rows.

    Attributes:
        rows: int64 [n], each once.
        gradients: float32 [n, dim], that of the update; where there are several, the sum of what ``adagrad`` takes from
            the row for each of them at a rate of 1, after the worker's own updates before it.
        updates: int64 [n], how many.
        squares: float32 [n], the sum over the updates of the mean squares of their gradients.
    """

    rows: np.ndarray
    gradients: np.ndarray
    updates: np.ndarray
    squares: np.ndarray

    @classmethod
    def joined(cls, pushes: Sequence[Push]) -> Push:
        """Return pushes of different rows as one."""
        return cls(
            np.concatenate([push.rows for push in pushes]),
            np.concatenate([push.gradients for push in pushes]),
            np.concatenate([push.updates for push in pushes]),
            np.concatenate([push.squares for push in pushes]),
        )


@dataclass(frozen=True, slots=True)
class Answer:
    """Rows that a worker has asked for and does not hold, or holds too old.

    Attributes:
        asked: int64 [n], their places among the rows that it has asked for.
        values: float32 [n, dim].
        squares: float32 [n], see ``RowTable``.
        versions: int64 [n].
    """

    asked: np.ndarray
    values: np.ndarray
    squares: np.ndarray
    versions: np.ndarray

    @classmethod
    def empty(cls) -> Answer:
        """Return an answer to no rows."""
        none = np.empty(0, np.int64)
        return cls(none, np.empty((0, 1), np.float32), np.empty(0, np.float32), none)

    def part(self, entries: np.ndarray, asked: np.ndarray) -> Answer:
        """Return some entries int64 [k] as the answer to rows at the places ``asked`` int64 [k]."""
        return Answer(asked, self.values[entries], self.squares[entries], self.versions[entries])

    def joined(self, other: Answer) -> Answer:
        """Return both answers to the same rows as one."""
        if not len(other.asked):
            return self
        names = (one.name for one in fields(self))
        return Answer(*(np.concatenate([getattr(self, name), getattr(other, name)]) for name in names))


@dataclass(eq=False, slots=True)
class RowTable:
    """All rows, on the host.

    Attributes:
        values: float32 [num_rows, dim].
        squares: float32 [num_rows], the sum over steps of the mean square of a row's gradient (row-wise Adagrad).
        versions: int64 [num_rows].
    """

    values: np.ndarray
    squares: np.ndarray
    versions: np.ndarray

    @classmethod
    def drawn(cls, rows: range, dim: int, deviation: float, seed: int) -> RowTable:
        """Return some rows of a table of normally distributed values, which do not depend on which rows are asked for.

        ``rows``: numbers without gaps.
        """
        values = np.empty((len(rows), dim), np.float32)

        def draw(first: int) -> None:
            block = np.random.default_rng((seed, first)).standard_normal((_DRAWN, dim), dtype=np.float32)
            begin, end = max(first, rows.start), min(first + _DRAWN, rows.stop)
            part = block[begin - first : end - first]
            np.multiply(part, np.float32(deviation), out=values[begin - rows.start : end - rows.start])

        with ThreadPoolExecutor(os.cpu_count()) as threads:  # numpy draws without Python's lock
            list(threads.map(draw, range(rows.start // _DRAWN * _DRAWN, rows.stop, _DRAWN)))
        return cls(values, np.zeros(len(rows), np.float32), np.zeros(len(rows), np.int64))

    def answer(self, rows: np.ndarray, versions: np.ndarray, read_bound: int) -> Answer:
        """Return the rows that are more than ``read_bound`` updates newer than a worker's copies.

        ``rows``: int64 [n]; ``versions``: int64 [n], those of the copies, -1 where there is none.
        """
        asked = np.flatnonzero((versions < 0) | (self.versions[rows] - versions > read_bound))
        wanted = rows[asked]
        return Answer(asked, self.values[wanted], self.squares[wanted], self.versions[wanted])

    def apply(self, pushes: Sequence[Push], rate: float) -> None:
        """Update the rows of one step's pushes, added up in this order.

        Gradients of workers that have not waited are parts of one gradient. Where updates have waited, a worker has
        taken steps without the squares of the others; its part is shortened as they would have shortened it.
        """
        everything = Push.joined(pushes)
        rows, place = np.unique(everything.rows, return_inverse=True)
        most, waited = np.zeros(len(rows), np.int64), np.zeros(len(rows), np.float32)
        np.maximum.at(most, place, everything.updates)
        np.add.at(waited, place, everything.squares)
        has_waited = most > 1
        parts = everything.gradients.copy()
        late = has_waited[place]
        before = self.squares[everything.rows[late]]
        parts[late] = as_steps(parts[late], everything.updates[late], before, everything.squares[late])
        parts[late] *= (_root(before + everything.squares[late]) / _root(before + waited[place[late]]))[:, None]
        total = np.zeros((len(rows), self.values.shape[1]), np.float32)
        np.add.at(total, place, parts)
        self.squares[rows] += np.where(has_waited, waited, mean_square(total))
        total[~has_waited] = adagrad_step(total[~has_waited], self.squares[rows[~has_waited]])
        self.values[rows] -= np.float32(rate) * total
        np.add.at(self.versions, everything.rows, everything.updates)


def mean_square(gradients: np.ndarray) -> np.ndarray:
    """Return the mean square [n] of each row's gradient [n, dim]."""
    squares: np.ndarray = np.mean(gradients * gradients, axis=1)
    return squares


def adagrad_step(gradients: np.ndarray, squares: np.ndarray) -> np.ndarray:
    """Return what row-wise Adagrad takes from rows for gradients [n, dim] at a rate of 1, [n, dim].

    Adagrad (Duchi et al. 2011) with one sum of squares for each row; ``squares`` [n] has these gradients in it. A
    gradient of zeros changes nothing.
    """
    return gradients / _root(squares)[:, None]


def as_steps(gradients: np.ndarray, updates: np.ndarray, squares: np.ndarray, added: np.ndarray) -> np.ndarray:
    """Return what waits in rows, ``Push.gradients`` [n, dim], as steps at a rate of 1.

    ``squares``: [n], without what waits; ``added``: [n], of what waits.
    """
    return np.where(updates[:, None] > 1, gradients, adagrad_step(gradients, squares + added))


def _root(squares: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    return np.sqrt(squares) + np.float32(EPSILON)
