"""A worker's copies of some rows of a table, each with a clock: the client of HET (Miao et al. 2021, section 3).

A copy may be ``read_bound`` updates older than the table, and ``write_bound`` updates of it may wait before they are
sent. A worker reads its own updates at once. With both bounds at 0 every read is of the newest row, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from bytescale_ext.states.rows import Answer, Push, adagrad_step, as_steps, mean_square

POLICIES: Final = ("lru", "lfu", "lfuopt")
"""Which copy makes room for another: the least recently used one, the least often used one, or that with the exception
of copies that were used ``PERMANENT_USES`` times."""
PERMANENT_USES: Final = 10
_MOST_STEPS: Final = 1 << 40


class Rows(Protocol):
    """Where rows are fetched from."""

    def answer(self, rows: np.ndarray, versions: np.ndarray, read_bound: int) -> Answer:
        """Return rows int64 [n] that are newer than copies of these versions [n]; see ``RowTable.answer``."""
        ...


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """Size and bounds of a cache.

    Attributes:
        num_lines: the most copies.
        policy: one of ``POLICIES``.
        read_bound: the most updates that a copy lacks when it is read.
        write_bound: the most updates that wait in a copy.
    """

    num_lines: int
    policy: str = POLICIES[0]
    read_bound: int = 0
    write_bound: int = 0


@dataclass(slots=True)
class Traffic:
    """What a worker has read and sent.

    Attributes:
        num_read: rows of its batches, each counted once in a batch.
        num_fetched: rows that came from the table.
        num_staged: of these, rows that came before the batch that reads them.
        num_pushed: rows whose gradients went to the table.
    """

    num_read: int = 0
    num_fetched: int = 0
    num_staged: int = 0
    num_pushed: int = 0


@dataclass(frozen=True, slots=True)
class Staged:
    """Rows that were fetched before the batch that reads them.

    Attributes:
        rows: int64 [n], ascending.
        answer: what the table held of them, in this order.
    """

    rows: np.ndarray
    answer: Answer


NOTHING_STAGED: Final = Staged(np.empty(0, np.int64), Answer.empty())


@dataclass(eq=False)
class RowCache:
    """The copies of one worker. Each batch is one lookup, then one update of the same rows.

    A batch with more rows than lines is right too: rows without a line are fetched, and pushed at once. Between the
    two the rows of the next batch may be staged, in another thread too.

    Attributes:
        settings: size and bounds.
        num_rows: of the table.
        dim: of a row.
        traffic: counted so far.
        slot_of: int32 [num_rows], the line of a row, -1 where there is none.
        row: int64 [lines], the row of a line, -1 where it is free.
        version: int64 [lines], updates that the copy contains.
        updates: int64 [lines], updates that wait.
        values: float32 [lines, dim], the copy without these.
        squares: float32 [lines], its sum of squares.
        pending: float32 [lines, dim], the updates that wait; see ``Push.gradients``.
        added: float32 [lines], the sum of the mean squares of these gradients.
    """

    settings: CacheSettings
    num_rows: int
    dim: int
    traffic: Traffic = field(default_factory=Traffic)

    def __post_init__(self) -> None:
        lines = self.settings.num_lines
        self.slot_of = np.full(self.num_rows, -1, np.int32)
        self.row = np.full(lines, -1, np.int64)
        self.version, self.updates, self._uses, self._last_use = (np.zeros(lines, np.int64) for _ in range(4))
        self.values, self.pending = (np.zeros((lines, self.dim), np.float32) for _ in range(2))
        self.squares, self.added = (np.zeros(lines, np.float32) for _ in range(2))
        self._num_batches = 0
        self._evicted: list[Push] = []
        self._batch = np.empty(0, np.int64)
        self._staged = NOTHING_STAGED

    def lookup(self, rows: np.ndarray, table: Rows, rate: float) -> np.ndarray:
        """Return the values float32 [n, dim] of a batch's rows int64 [n], each given once, with one's own updates."""
        slots = self.slot_of[rows]
        held = slots >= 0
        answer = self._answer(rows, table)
        renewed = held[answer.asked]
        self._store(slots[answer.asked[renewed]], answer, renewed)
        self._num_batches += 1
        self._touch(slots[held])
        values = np.empty((len(rows), self.dim), np.float32)
        values[answer.asked] = answer.values
        values[held] = self._with_pending(slots[held], rate)
        new = ~renewed
        slots = self._make_room(int(new.sum()))
        new[np.flatnonzero(new)[len(slots) :]] = False  # the others get no line
        self.row[slots] = rows[answer.asked[new]]
        self.slot_of[self.row[slots]] = slots
        self._uses[slots] = 0
        self._store(slots, answer, new)
        self._touch(slots)
        self.traffic.num_read += len(rows)
        self._batch = rows
        return values

    def stage(self, rows: np.ndarray, table: Rows) -> None:
        """Fetch ahead which of the next batch's rows int64 [n], ascending, have no copy or one that is too old.

        Rows of the running batch are left to the lookup, and so are rows that made room while updates waited in them:
        the table does not have these updates yet, and a worker reads its own.
        """
        rows = np.setdiff1d(rows, np.concatenate([self._batch, *(push.rows for push in self._evicted)]))
        answer = table.answer(rows, self._versions(rows), self.settings.read_bound)
        self._staged = Staged(rows[answer.asked], answer)
        self.traffic.num_fetched += len(answer.asked)
        self.traffic.num_staged += len(answer.asked)

    def update(self, rows: np.ndarray, gradients: np.ndarray, rate: float) -> Push:
        """Take the gradients [n, dim] of the batch's rows int64 [n]; return what goes to the table now."""
        slots = self.slot_of[rows]
        held = slots >= 0
        mine, squares = slots[held], mean_square(gradients)
        self._wait(mine, gradients[held], squares[held])
        direct = Push(rows[~held], gradients[~held], np.ones(int((~held).sum()), np.int64), squares[~held])
        due = self._take(mine[self.updates[mine] > self.settings.write_bound], rate)
        push = Push.joined([*self._evicted, due, direct])
        self._evicted.clear()
        self.traffic.num_pushed += len(push.rows)
        return push

    def flush(self, rate: float) -> Push:
        """Return all updates that wait; the copies stay, staged rows do not, because they lack these updates."""
        self._staged = NOTHING_STAGED
        push = Push.joined([*self._evicted, self._take(np.flatnonzero(self.updates), rate)])
        self._evicted.clear()
        self.traffic.num_pushed += len(push.rows)
        return push

    def _versions(self, rows: np.ndarray) -> np.ndarray:
        """Return the versions int64 [n] of the copies of rows [n], -1 where there is none."""
        slots = self.slot_of[rows]
        versions = np.full(len(rows), -1)
        versions[slots >= 0] = self.version[slots[slots >= 0]]
        return versions

    def _answer(self, rows: np.ndarray, table: Rows) -> Answer:
        """Return what a lookup of rows [n] needs from the table, as far as possible from what was staged."""
        staged, self._staged = self._staged, NOTHING_STAGED
        versions = self._versions(rows)
        _, places, sources = np.intersect1d(rows, staged.rows, assume_unique=True, return_indices=True)
        versions[places] = staged.answer.versions[sources]
        fetched = table.answer(rows, versions, self.settings.read_bound)
        self.traffic.num_fetched += len(fetched.asked)
        is_new = ~np.isin(places, fetched.asked)
        return fetched.joined(staged.answer.part(sources[is_new], places[is_new]))

    def _store(self, slots: np.ndarray, answer: Answer, part: np.ndarray) -> None:
        """Copy the rows of an answer that ``part`` (bool [n]) names to lines; what waits in them stays."""
        self.values[slots], self.squares[slots] = answer.values[part], answer.squares[part]
        self.version[slots] = answer.versions[part]

    def _touch(self, slots: np.ndarray) -> None:
        self._uses[slots] += 1
        self._last_use[slots] = self._num_batches

    def _with_pending(self, slots: npt.NDArray[np.int64], rate: float) -> npt.NDArray[np.float32]:
        """Return the values [n, dim] of lines, with the updates that wait as the table would apply them alone."""
        return self.values[slots] - np.float32(rate) * self._steps(slots)

    def _steps(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """Return what waits in lines, as steps [n, dim] at a rate of 1."""
        return as_steps(self.pending[slots], self.updates[slots], self.squares[slots], self.added[slots])

    def _wait(self, slots: np.ndarray, gradients: np.ndarray, squares: np.ndarray) -> None:
        """Let one more update wait in each line, of a gradient [n, dim] with this mean square [n]."""
        added, first = self.added[slots] + squares, self.updates[slots] == 0
        steps = self._steps(slots) + adagrad_step(gradients, self.squares[slots] + added)
        self.pending[slots] = np.where(first[:, None], gradients, steps)
        self.added[slots] = added
        self.updates[slots] += 1

    def _take(self, slots: np.ndarray, rate: float) -> Push:
        """Return the updates that wait in lines, and count them as part of the copies."""
        push = self._waiting(slots)
        self.values[slots] = self._with_pending(slots, rate)
        self.squares[slots] += push.squares
        self.version[slots] += push.updates
        self._forget(slots)
        return push

    def _waiting(self, slots: np.ndarray) -> Push:
        """Return what waits in lines [n]."""
        return Push(self.row[slots], self.pending[slots], self.updates[slots], self.added[slots])

    def _forget(self, slots: np.ndarray) -> None:
        """Let nothing wait in lines [n]."""
        self.pending[slots] = 0.0
        self.added[slots] = 0.0
        self.updates[slots] = 0

    def _make_room(self, wanted: int) -> np.ndarray:
        """Return up to ``wanted`` lines [n] that no row of this batch has, emptied."""
        free = np.flatnonzero(self.row < 0)[:wanted]
        missing = wanted - len(free)
        if not missing:
            return free
        may_go = (self.row >= 0) & (self._last_use < self._num_batches)
        if self.settings.policy == "lfuopt":
            may_go &= self._uses < PERMANENT_USES
        slots = np.flatnonzero(may_go)
        if len(slots) > missing:
            slots = slots[np.argpartition(self._priority(slots), missing)[:missing]]
        dirty = slots[self.updates[slots] > 0]
        if len(dirty):
            self._evicted.append(self._waiting(dirty))
        self.slot_of[self.row[slots]] = -1
        self.row[slots] = -1
        self._forget(slots)
        return np.concatenate([free, slots])

    def _priority(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return a number for each line [n]; the lowest go first."""
        if self.settings.policy == "lru":
            return self._last_use[slots]
        return self._uses[slots] * _MOST_STEPS + self._last_use[slots]
