"""Simple cache with dictionaries and one row at a time, as a reference for ``RowCache``."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from bytescale_ext.states.cache import PERMANENT_USES, CacheSettings
from bytescale_ext.states.rows import RowTable


@dataclass
class Line:
    """Cached copy: its row's version, pending updates and their gradients, and time and number of uses.

    ``gradient``: gradient of a single update, or the sum of the steps of several updates at a rate of 1.
    """

    version: int
    waiting: int
    gradient: np.ndarray
    value: np.ndarray
    square: np.float32
    uses: int = 0
    last_use: int = 0
    added: np.float32 = field(default_factory=np.float32)

    def with_waiting(self, rate: float) -> tuple[np.ndarray, np.float32]:
        """Return the value [dim] and the square after the pending updates."""
        return self.value - np.float32(rate) * self.steps(), np.float32(self.square + self.added)

    def steps(self) -> np.ndarray:
        """Return the pending updates as steps [dim] at a rate of 1."""
        return self.gradient if self.waiting > 1 else self.gradient / self.root()

    def root(self) -> np.float32:
        """Return the root of the squares, including pending updates."""
        return np.float32(np.sqrt(np.float32(self.square + self.added)) + np.float32(1e-10))

    def wait(self, gradient: np.ndarray) -> None:
        """Add a pending gradient [dim]."""
        steps = self.steps()
        self.added = np.float32(self.added + np.mean(gradient * gradient))
        self.gradient = steps + gradient / self.root() if self.waiting else gradient
        self.waiting += 1


@dataclass
class PlainCache:
    """Copies of one worker by row, and its counters."""

    settings: CacheSettings
    lines: dict[int, Line] = field(default_factory=dict)
    leaving: dict[int, tuple[int, np.ndarray]] = field(default_factory=dict)
    clock: int = 0
    num_fetched: int = 0
    num_pushed: int = 0

    def lookup(self, rows: list[int], table: RowTable, rate: float) -> dict[int, np.ndarray]:
        """Return the value [dim] of each row."""
        self.clock += 1
        found, new = {}, {}
        for row in rows:
            line = self.lines.get(row)
            is_old = line is None or table.versions[row] - line.version > self.settings.read_bound
            self.num_fetched += is_old
            if line is None:
                new[row] = self.fetched(row, table)
                found[row] = new[row].value
                continue
            if is_old:
                fresh = self.fetched(row, table)
                line.version, line.value, line.square = fresh.version, fresh.value, fresh.square
            line.uses, line.last_use = line.uses + 1, self.clock
            found[row] = line.with_waiting(rate)[0]
        for row, line in new.items():
            if len(self.lines) < self.settings.num_lines or self.drop_one():
                line.uses, line.last_use = 1, self.clock
                self.lines[row] = line
        return found

    def fetched(self, row: int, table: RowTable) -> Line:
        """Return a new copy of a row."""
        value = table.values[row].copy()
        return Line(int(table.versions[row]), 0, np.zeros_like(value), value, table.squares[row])

    def drop_one(self) -> bool:
        """Drop the next copy to evict; return whether there was a copy."""
        policy = self.settings.policy
        able = [
            (line.last_use if policy == "lru" else (line.uses, line.last_use), row)
            for row, line in self.lines.items()
            if line.last_use < self.clock and not (policy == "lfuopt" and line.uses >= PERMANENT_USES)
        ]
        if not able:
            return False
        _, row = min(able)
        line = self.lines.pop(row)
        if line.waiting:
            self.leaving[row] = line.waiting, line.gradient
        return True

    def update(self, rows: list[int], gradients: np.ndarray, rate: float) -> dict[int, tuple[int, np.ndarray]]:
        """Return the updates and gradients [dim] that are sent to the table now, by row. ``gradients``: [n, dim]."""
        sent, self.leaving = self.leaving, {}
        for row, gradient in zip(rows, gradients, strict=True):
            line = self.lines.get(row)
            if line is None:
                sent[row] = 1, gradient
                continue
            line.wait(gradient)
            if line.waiting > self.settings.write_bound:
                sent[row] = self.sent(line, rate)
        self.num_pushed += len(sent)
        return sent

    def sent(self, line: Line, rate: float) -> tuple[int, np.ndarray]:
        """Return the pending updates of a copy, which applies them."""
        result = line.waiting, line.gradient
        line.value, line.square = line.with_waiting(rate)
        line.version, line.waiting, line.gradient = line.version + line.waiting, 0, np.zeros_like(line.gradient)
        line.added = np.float32(0)
        return result
