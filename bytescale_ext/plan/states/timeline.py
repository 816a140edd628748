"""When each move of a step runs, at given speeds: copies both ways beside the processor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from bytescale_ext.plan.states.moves import Kind, Move, moved_bytes, step_moves
from bytescale_ext.plan.states.pages import FLOAT_BYTES, PageTable

ADAM_BYTES: Final = 7 * FLOAT_BYTES
"""Host memory that Adam reads and writes for an element: gradient once, parameter and two moments both ways."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """Speeds of a machine.

    Attributes:
        link_bytes_per_second: between device and host, one way.
        adam_bytes_per_second: host memory that Adam reads and writes.
    """

    link_bytes_per_second: float
    adam_bytes_per_second: float


@dataclass(frozen=True, slots=True)
class TimedMove:
    """A move with its time in seconds from the start of the optimizer's step."""

    move: Move
    start: float
    stop: float


def replay(table: PageTable, element_bytes: int, speeds: Speeds) -> tuple[TimedMove, ...]:
    """Return the moves of a step with their times. ``element_bytes``: of parameters with a float32 copy."""
    host = 0.0  # until when the processor is busy
    free = {Kind.FETCH: 0.0, Kind.RETURN: 0.0}  # when each direction of the link is
    fetched: dict[int, float] = {}  # by buffer
    returned: dict[int, float] = {}
    found = []
    for move in step_moves(table):
        page = table.pages[move.page]
        if move.kind is Kind.UPDATE:
            start = max(host, fetched[move.buffer], returned.get(move.buffer, 0.0))
            stop = host = start + page.num_elements * ADAM_BYTES / speeds.adam_bytes_per_second
        else:
            if move.kind is Kind.FETCH and not page.has_copy:
                host = max(host, returned.get(move.buffer, 0.0))
            start = max(host, free[move.kind])
            stop = free[move.kind] = start + moved_bytes(page, move.kind, element_bytes) / speeds.link_bytes_per_second
            (fetched if move.kind is Kind.FETCH else returned)[move.buffer] = stop
        found.append(TimedMove(move, start, stop))
    return tuple(found)


def step_seconds(moves: Sequence[TimedMove]) -> float:
    """Return when the last move has ended."""
    return max((move.stop for move in moves), default=0.0)
