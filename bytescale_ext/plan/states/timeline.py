"""Times of each move of a step at given speeds: copies both ways, a disk and the processor."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Final

from bytescale_ext.plan.states.moves import DISK_KINDS, Kind, Move, disk_bytes, moved_bytes, step_moves
from bytescale_ext.plan.states.pages import FLOAT_BYTES, PageTable
from bytescale_ext.plan.states.tiers import NUM_SLOTS

ADAM_BYTES: Final = 7 * FLOAT_BYTES
"""Host memory that Adam reads and writes for an element: gradient once, parameter and two moments both ways."""

ADAM_BYTES_PER_SECOND: Final = 20e9
"""Speed of Adam on the processor, for each process, if it is not given."""

READ_BYTES_PER_SECOND: Final = 6e9
WRITE_BYTES_PER_SECOND: Final = 3e9
"""Speeds of a local disk for each process, if they are not given."""


IN_HOST: Final = (Kind.FETCH, Kind.RETURN)
"""The copies of a device that is host memory."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """Speeds of a machine.

    Attributes:
        link_bytes_per_second: between device and host, one way.
        adam_bytes_per_second: host memory that Adam reads and writes.
        read_bytes_per_second, write_bytes_per_second: speeds of the disk, which does one of both at a time.
        in_host: copies that the processor makes in host memory, because gradients, or parameters too, are there.
    """

    link_bytes_per_second: float
    adam_bytes_per_second: float
    read_bytes_per_second: float = math.inf
    write_bytes_per_second: float = math.inf
    in_host: tuple[Kind, ...] = ()

    def of_stage(self, stage: int) -> Speeds:
        """Return the speeds of a stage, where gradients (from 2 on) and parameters (3) are in host memory."""
        return self if self.in_host == IN_HOST else replace(self, in_host=IN_HOST[: stage - 1])


@dataclass(frozen=True, slots=True)
class TimedMove:
    """A move with its time in seconds from the start of the optimizer's step; reads ahead of it end at 0."""

    move: Move
    start: float
    stop: float


def time_moves(
    table: PageTable, element_bytes: int, speeds: Speeds, on_disk: Collection[int] = ()
) -> tuple[TimedMove, ...]:
    """Return the moves of a step with their times.

    ``element_bytes``: of parameters with a float32 copy; ``on_disk``: the pages that are read and written.
    """
    clock = _Clock(table, element_bytes, speeds)
    clock.begin_reads(sorted(on_disk)[:NUM_SLOTS])
    return tuple(clock.timed(move) for move in step_moves(table, on_disk))


class _Clock:
    """Until when the processor, each direction of the link, the disk and each buffer and slot are busy."""

    def __init__(self, table: PageTable, element_bytes: int, speeds: Speeds) -> None:
        self._table, self._element_bytes, self._speeds = table, element_bytes, speeds
        self._host = 0.0
        self._free = {Kind.FETCH: 0.0, Kind.RETURN: 0.0}
        self._fetched: dict[int, float] = {}  # by buffer
        self._returned: dict[int, float] = {}
        self._disk = 0.0
        self._ahead = 0.0  # when the next read ahead of the step begins
        self._read: dict[int, float] = {}  # by page
        self._written: dict[int, float] = {}  # by slot

    def begin_reads(self, pages: Sequence[int]) -> None:
        """Let the reads ahead of the step, which are of these pages, end when it begins."""
        self._ahead = -sum(disk_bytes(self._table, page) for page in pages) / self._speeds.read_bytes_per_second

    def timed(self, move: Move) -> TimedMove:
        """Return the time of the next move."""
        if move.kind in DISK_KINDS:
            return TimedMove(move, *self._on_disk(move))
        return TimedMove(move, *(self._update(move) if move.kind is Kind.UPDATE else self._copy(move)))

    def _update(self, move: Move) -> tuple[float, float]:
        ready = self._fetched[move.buffer], self._returned.get(move.buffer, 0.0), self._read.get(move.page, 0.0)
        start = max(self._host, *ready)
        size = self._table.pages[move.page].num_elements * ADAM_BYTES
        self._host = start + size / self._speeds.adam_bytes_per_second
        return start, self._host

    def _copy(self, move: Move) -> tuple[float, float]:
        page = self._table.pages[move.page]
        if move.kind is Kind.FETCH and not page.has_copy:
            self._host = max(self._host, self._returned.get(move.buffer, 0.0))
        start = max(self._host, self._free[move.kind])
        size = moved_bytes(page, move.kind, self._element_bytes)
        if move.kind in self._speeds.in_host:
            start, self._host = self._host, self._host + 2 * size / self._speeds.adam_bytes_per_second
            (self._fetched if move.kind is Kind.FETCH else self._returned)[move.buffer] = self._host
            return start, self._host
        stop = self._free[move.kind] = start + size / self._speeds.link_bytes_per_second
        (self._fetched if move.kind is Kind.FETCH else self._returned)[move.buffer] = stop
        return start, stop

    def _on_disk(self, move: Move) -> tuple[float, float]:
        size = disk_bytes(self._table, move.page)
        if move.kind is Kind.WRITE:
            start = max(self._host, self._disk)
            self._disk = self._written[move.buffer] = start + size / self._speeds.write_bytes_per_second
            return start, self._disk
        seconds = size / self._speeds.read_bytes_per_second
        if move.buffer not in self._written:  # ahead of the step
            start, self._ahead = self._ahead, self._ahead + seconds
            return start, self._ahead
        start = max(self._host, self._disk, self._written[move.buffer])
        self._disk = self._read[move.page] = start + seconds
        return start, self._disk


def optimizer_step_seconds(moves: Sequence[TimedMove]) -> float:
    """Return the end of the last move that the step waits for. The last writes overlap with the next step."""
    return max((one.stop for one in moves if one.move.kind not in DISK_KINDS), default=0.0)
