"""Cache of a worker's copies of table rows, each with a version: the client of HET (Miao et al. 2021, section 3).

A copy may lack ``read_bound`` updates of the table. Up to ``write_bound`` updates of a copy are pending before they are
sent. A worker always reads its own updates. If both bounds are 0, every read returns the newest row exactly.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from bytescale_ext.states.rows import Answer, Push, adagrad_step, as_steps, mean_square

POLICIES: Final = ("lru", "lfu", "lfuopt")
"""Which copy is evicted: the least recently used, the least frequently used, or the least frequently used except copies
with ``PERMANENT_USES`` uses."""
PERMANENT_USES: Final = 10
_MOST_STEPS: Final = 1 << 40


class RowSource(Protocol):
    """Table that answers requests for rows."""

    def answer(self, rows: np.ndarray, versions: np.ndarray, read_bound: int) -> Answer:
        """Return the rows, int64 [n], that are newer than copies of ``versions``, [n]; see ``RowTable.answer``."""
        ...


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """Size and bounds of a cache.

    Attributes:
        num_lines: largest number of copies.
        policy: one of ``POLICIES``.
        read_bound: largest number of updates that a copy may lack when it is read.
        write_bound: largest number of pending updates of a copy.
    """

    num_lines: int
    policy: str = POLICIES[0]
    read_bound: int = 0
    write_bound: int = 0


@dataclass(slots=True)
class RowCounts:
    """Number of rows that a worker has read and transferred.

    Attributes:
        num_read: rows of its batches, counted once per batch.
        num_missed: rows of its batches that came from the table, counted once per batch.
        num_fetched: rows fetched from the table; a row that was fetched ahead and has changed since counts twice.
        num_staged: fetched rows that arrived before the batch that reads them.
        num_pushed: rows whose updates were sent to the table.
        num_lacking: updates that copies lacked when batches read them, counted by the owner of the rows for all
            workers.
    """

    num_read: int = 0
    num_missed: int = 0
    num_fetched: int = 0
    num_staged: int = 0
    num_pushed: int = 0
    num_lacking: int = 0


@dataclass(frozen=True, slots=True)
class PrefetchedRows:
    """Rows fetched before the batch that reads them.

    Attributes:
        rows: numbers of the rows, ascending, int64 [n].
        answer: the table's answer for these rows, in the same order.
    """

    rows: np.ndarray
    answer: Answer


NOTHING_STAGED: Final = PrefetchedRows(np.empty(0, np.int64), Answer.empty())


@dataclass(eq=False)
class RowCache:
    """Copies of one worker, one per line. Each batch is one ``lookup`` followed by one ``update`` of the same rows.

    A batch may have more rows than the cache has lines: rows without a line are fetched, and their updates are pushed
    immediately. Between lookup and update the rows of the next batch may be staged, also by another thread.

    Attributes:
        settings: size and bounds.
        num_rows: number of rows of the table.
        dim: width of a row.
        traffic: traffic so far.
        line: line of each row, or -1 without a copy; int32 [num_rows].
        row: row of each line, or -1 in a free line; int64 [lines].
        version: number of updates that each copy contains; int64 [lines].
        updates: number of pending updates of each copy; int64 [lines].
        values: values of each copy without pending updates; float32 [lines, dim].
        squares: Adagrad sum of each copy without pending updates; float32 [lines].
        pending: pending updates of each copy, as ``Push.gradients``; float32 [lines, dim].
        added: pending updates' sum of mean squares, as ``Push.squares``; float32 [lines].
    """

    settings: CacheSettings
    num_rows: int
    dim: int
    traffic: RowCounts = field(default_factory=RowCounts)

    def __post_init__(self) -> None:
        lines = self.settings.num_lines
        self.line = np.full(self.num_rows, -1, np.int32)
        self.row = np.full(lines, -1, np.int64)
        self.version, self.updates, self._uses, self._last_use = (np.zeros(lines, np.int64) for _ in range(4))
        self.values, self.pending = (np.zeros((lines, self.dim), np.float32) for _ in range(2))
        self.squares, self.added = (np.zeros(lines, np.float32) for _ in range(2))
        self._num_batches = 0
        self._evicted: list[Push] = []
        self._batch = np.empty(0, np.int64)
        self._staged = NOTHING_STAGED

    def lookup(self, rows: np.ndarray, table: RowSource, rate: float) -> np.ndarray:
        """Return the values, float32 [n, dim], of a batch's unique rows, int64 [n], with the worker's own updates.

        ``rate``: learning rate of the pending updates.
        """
        lines = self.line[rows]
        cached = lines >= 0
        answer = self._answer(rows, table)
        renewed = cached[answer.asked]
        self._store(lines[answer.asked[renewed]], answer, renewed)
        self._num_batches += 1
        self._touch(lines[cached])
        values = np.empty((len(rows), self.dim), np.float32)
        values[answer.asked] = answer.values
        values[cached] = self._with_pending(lines[cached], rate)
        new = ~renewed
        lines = self._make_room(int(new.sum()))
        new[np.flatnonzero(new)[len(lines) :]] = False  # the other rows get no line
        self.row[lines] = rows[answer.asked[new]]
        self.line[self.row[lines]] = lines
        self._uses[lines] = 0
        self._store(lines, answer, new)
        self._touch(lines)
        self.traffic.num_read += len(rows)
        self.traffic.num_missed += len(answer.asked)
        self._batch = rows
        return values

    def stage(self, rows: np.ndarray, table: RowSource) -> None:
        """Fetch the next batch's rows, int64 [n], ascending, that have no copy or whose copy is too old.

        Two kinds of rows wait for the lookup: rows of the current batch, and rows evicted with pending updates. The
        table lacks these updates so far, but a worker must read them.
        """
        rows = np.setdiff1d(rows, np.concatenate([self._batch, *(push.rows for push in self._evicted)]))
        answer = table.answer(rows, self._versions(rows), self.settings.read_bound)
        self._staged = PrefetchedRows(rows[answer.asked], answer)
        self.traffic.num_fetched += len(answer.asked)
        self.traffic.num_staged += len(answer.asked)

    def update(self, rows: np.ndarray, gradients: np.ndarray, rate: float) -> Push:
        """Add the gradients, [n, dim], of the batch's rows, int64 [n], and return the updates to send to the table."""
        lines = self.line[rows]
        cached = lines >= 0
        cached_lines, squares = lines[cached], mean_square(gradients)
        self._add_pending(cached_lines, gradients[cached], squares[cached])
        direct = Push(rows[~cached], gradients[~cached], np.ones(int((~cached).sum()), np.int64), squares[~cached])
        due = self._take_pending(cached_lines[self.updates[cached_lines] > self.settings.write_bound], rate)
        push = Push.joined([*self._evicted, due, direct])
        self._evicted.clear()
        self.traffic.num_pushed += len(push.rows)
        return push

    def flush(self, rate: float) -> Push:
        """Return all pending updates. Copies remain; staged rows are dropped, because they lack these updates."""
        self._staged = NOTHING_STAGED
        push = Push.joined([*self._evicted, self._take_pending(np.flatnonzero(self.updates), rate)])
        self._evicted.clear()
        self.traffic.num_pushed += len(push.rows)
        return push

    def _versions(self, rows: np.ndarray) -> np.ndarray:
        """Return the versions of the copies of rows [n], -1 without a copy: int64 [n]."""
        lines = self.line[rows]
        versions = np.full(len(rows), -1)
        versions[lines >= 0] = self.version[lines[lines >= 0]]
        return versions

    def _answer(self, rows: np.ndarray, table: RowSource) -> Answer:
        """Return the table's rows that a lookup of rows [n] needs; staged rows are fetched again only if too old."""
        staged, self._staged = self._staged, NOTHING_STAGED
        versions = self._versions(rows)
        _, positions, sources = np.intersect1d(rows, staged.rows, assume_unique=True, return_indices=True)
        versions[positions] = staged.answer.versions[sources]
        fetched = table.answer(rows, versions, self.settings.read_bound)
        self.traffic.num_fetched += len(fetched.asked)
        is_new = ~np.isin(positions, fetched.asked)
        return fetched.joined(staged.answer.part(sources[is_new], positions[is_new]))

    def _store(self, lines: np.ndarray, answer: Answer, part: np.ndarray) -> None:
        """Copy the rows selected by ``part`` (bool [n]) from an answer to lines. Pending updates remain."""
        self.values[lines], self.squares[lines] = answer.values[part], answer.squares[part]
        self.version[lines] = answer.versions[part]

    def _touch(self, lines: np.ndarray) -> None:
        self._uses[lines] += 1
        self._last_use[lines] = self._num_batches

    def _with_pending(self, lines: npt.NDArray[np.int64], rate: float) -> npt.NDArray[np.float32]:
        """Return the values of lines with their pending updates, [n, dim], as if no other worker updated them."""
        return self.values[lines] - np.float32(rate) * self._steps(lines)

    def _steps(self, lines: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """Return the pending updates of lines as Adagrad steps at rate 1, [n, dim]."""
        return as_steps(self.pending[lines], self.updates[lines], self.squares[lines], self.added[lines])

    def _add_pending(self, lines: np.ndarray, gradients: np.ndarray, squares: np.ndarray) -> None:
        """Add a pending update to each line, from its gradient [n, dim] and the gradient's mean square [n]."""
        added, first = self.added[lines] + squares, self.updates[lines] == 0
        steps = self._steps(lines) + adagrad_step(gradients, self.squares[lines] + added)
        self.pending[lines] = np.where(first[:, None], gradients, steps)
        self.added[lines] = added
        self.updates[lines] += 1

    def _take_pending(self, lines: np.ndarray, rate: float) -> Push:
        """Apply the pending updates of lines to the copies, and return the updates."""
        push = self._pending_push(lines)
        self.values[lines] = self._with_pending(lines, rate)
        self.squares[lines] += push.squares
        self.version[lines] += push.updates
        self._clear_pending(lines)
        return push

    def _pending_push(self, lines: np.ndarray) -> Push:
        """Return the pending updates of lines [n]."""
        return Push(self.row[lines], self.pending[lines], self.updates[lines], self.added[lines])

    def _clear_pending(self, lines: np.ndarray) -> None:
        """Remove the pending updates of lines [n]."""
        self.pending[lines] = 0.0
        self.added[lines] = 0.0
        self.updates[lines] = 0

    def _make_room(self, count: int) -> np.ndarray:
        """Return up to ``count`` empty lines [n]; lines of rows outside of the current batch are evicted if needed."""
        free = np.flatnonzero(self.row < 0)[:count]
        missing = count - len(free)
        if not missing:
            return free
        evictable = (self.row >= 0) & (self._last_use < self._num_batches)
        if self.settings.policy == "lfuopt":
            evictable &= self._uses < PERMANENT_USES
        lines = np.flatnonzero(evictable)
        if len(lines) > missing:
            lines = lines[np.argpartition(self._priority(lines), missing)[:missing]]
        dirty = lines[self.updates[lines] > 0]
        if len(dirty):
            self._evicted.append(self._pending_push(dirty))
        self.line[self.row[lines]] = -1
        self.row[lines] = -1
        self._clear_pending(lines)
        return np.concatenate([free, lines])

    def _priority(self, lines: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the priority of lines, [n]; lines of lowest priority are evicted first."""
        if self.settings.policy == "lru":
            return self._last_use[lines]
        return self._uses[lines] * _MOST_STEPS + self._last_use[lines]
