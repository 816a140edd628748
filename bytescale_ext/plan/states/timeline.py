"""Times of each move of a step at given speeds of the link, a disk and the processor."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Final

from bytescale_ext.plan.states.moves import DISK_KINDS, Kind, Move, disk_bytes, moved_bytes, step_moves
from bytescale_ext.plan.states.pages import FLOAT_BYTES, PageTable
from bytescale_ext.plan.states.tiers import NUM_SLOTS

ADAM_BYTES: Final = 7 * FLOAT_BYTES
"""Bytes that Adam reads and writes per element: it reads the gradient, and reads and writes the parameter and two
moments."""

ADAM_BYTES_PER_SECOND: Final = 20e9
"""Default speed of Adam on the processor, for each process."""

READ_BYTES_PER_SECOND: Final = 6e9
WRITE_BYTES_PER_SECOND: Final = 3e9
"""Default speeds of a local disk, for each process."""


IN_HOST: Final = (Kind.FETCH, Kind.RETURN)
"""Kinds of copies that stay in host memory if the device is the CPU."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """Speeds of a machine.

    Attributes:
        link_bytes_per_second: speed between device and host, in one direction.
        adam_bytes_per_second: speed at which Adam reads and writes host memory.
        read_bytes_per_second: speed of reads from the disk, which does not read and write at the same time.
        write_bytes_per_second: speed of writes to the disk.
        in_host: kinds of copies that stay in host memory, because gradients, or also parameters, are there.
    """

    link_bytes_per_second: float
    adam_bytes_per_second: float
    read_bytes_per_second: float = math.inf
    write_bytes_per_second: float = math.inf
    in_host: tuple[Kind, ...] = ()

    def of_stage(self, stage: int) -> Speeds:
        """Return the speeds in a ``--state-stage``: gradients (from 2 on) and parameters (in 3) are in host memory."""
        return self if self.in_host == IN_HOST else replace(self, in_host=IN_HOST[: stage - 1])


@dataclass(frozen=True, slots=True)
class TimedMove:
    """A move with its times, in seconds from the start of the optimizer's step. Reads ahead of the step end at 0."""

    move: Move
    start: float
    stop: float


def time_moves(
    table: PageTable, element_bytes: int, speeds: Speeds, on_disk: Collection[int] = ()
) -> tuple[TimedMove, ...]:
    """Return the moves of a step with their times.

    Args:
        table: page table.
        element_bytes: bytes of a parameter with a float32 copy on the device.
        speeds: speeds of the machine.
        on_disk: pages on a disk, which are read and written.
    """
    clock = _Clock(table, element_bytes, speeds)
    clock.begin_reads(sorted(on_disk)[:NUM_SLOTS])
    return tuple(clock.timed(move) for move in step_moves(table, on_disk))


class _Clock:
    """Times until which the processor, each direction of the link, the disk and each buffer and slot are busy."""

    def __init__(self, table: PageTable, element_bytes: int, speeds: Speeds) -> None:
        self._table, self._element_bytes, self._speeds = table, element_bytes, speeds
        self._host = 0.0
        self._free = {Kind.FETCH: 0.0, Kind.RETURN: 0.0}
        self._fetched: dict[int, float] = {}  # by buffer
        self._returned: dict[int, float] = {}
        self._disk = 0.0
        self._ahead = 0.0  # start of the next read ahead of the step
        self._read: dict[int, float] = {}  # by page
        self._written: dict[int, float] = {}  # by slot

    def begin_reads(self, pages: Sequence[int]) -> None:
        """Schedule the reads of these pages ahead of the step, so that they end when the step begins."""
        self._ahead = -sum(disk_bytes(self._table, page) for page in pages) / self._speeds.read_bytes_per_second

    def timed(self, move: Move) -> TimedMove:
        """Return the next move with its times."""
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
    """Return the end of the last move that the step waits for. The final writes overlap with the next step."""
    return max((timed.stop for timed in moves if timed.move.kind not in DISK_KINDS), default=0.0)
