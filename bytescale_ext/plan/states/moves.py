"""The moves of one step: gradients to the host, Adam on a page, results to the device.

fetch  0 1   2   3
update   0 1   2   3
return     0 1   2   3          while a page is updated, the gradients of the next one are copied
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from bytescale_ext.plan.states.pages import FLOAT_BYTES, NUM_BUFFERS, Page, PageTable


class Kind(StrEnum):
    """What a move does with a page.

    Attributes:
        FETCH: copies its gradients to a buffer in host memory, and its parameters where they have no float32 copy.
        UPDATE: runs Adam on the page and leaves the new parameters in the buffer.
        RETURN: copies the new parameters from the buffer to the device.
    """

    FETCH = "fetch"
    UPDATE = "update"
    RETURN = "return"


@dataclass(frozen=True, slots=True)
class Move:
    """One move of a page.

    Attributes:
        kind: what it does.
        page: number of the page.
        buffer: of host memory that it uses.
    """

    kind: Kind
    page: int
    buffer: int


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that a step copies between device and host.

    Attributes:
        fetched: to the host.
        returned: to the device.
    """

    fetched: int
    returned: int


def step_moves(table: PageTable) -> tuple[Move, ...]:
    """Return the moves of a step in the order in which they are started."""
    moves = [Move(Kind.FETCH, 0, 0)] if table.pages else []
    for page in range(len(table.pages)):
        if page + 1 < len(table.pages):
            moves.append(Move(Kind.FETCH, page + 1, (page + 1) % NUM_BUFFERS))
        moves += [Move(Kind.UPDATE, page, page % NUM_BUFFERS), Move(Kind.RETURN, page, page % NUM_BUFFERS)]
    return tuple(moves)


def moved_bytes(page: Page, kind: Kind, element_bytes: int) -> int:
    """Return the bytes that a move copies; parameters with a float32 copy have ``element_bytes`` on the device."""
    if kind is Kind.FETCH:
        return page.num_elements * FLOAT_BYTES * (1 if page.has_copy else 2)
    return page.num_elements * (element_bytes if page.has_copy else FLOAT_BYTES)


def traffic(table: PageTable, element_bytes: int) -> Traffic:
    """Return the bytes that a step copies; see ``moved_bytes``."""
    fetched, returned = (
        sum(moved_bytes(page, kind, element_bytes) for page in table.pages) for kind in (Kind.FETCH, Kind.RETURN)
    )
    return Traffic(fetched, returned)
