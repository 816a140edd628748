"""Moves of one step: gradients to the host, Adam's update of a page, results to the device.

fetch  0 1   2   3
update   0 1   2   3
return     0 1   2   3          while a page is updated, the gradients of the next page are copied

A page on a disk is also read into a slot before its update and written from it afterwards. The first slots are read
ahead of the step, and each slot is read again as soon as it is written.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

from bytescale_ext.plan.states.pages import FLOAT_BYTES, NUM_BUFFERS, NUM_MOMENTS, Page, PageTable
from bytescale_ext.plan.states.tiers import NUM_SLOTS


class Kind(StrEnum):
    """Kinds of moves of a page.

    Attributes:
        FETCH: copies its gradients to a buffer in host memory, and its parameters if they have no float32 copy.
        UPDATE: runs Adam on the page and leaves the new parameters in the buffer.
        RETURN: copies the new parameters from the buffer to the device.
        READ: reads its states from the disk to a slot in host memory.
        WRITE: writes its states from the slot to the disk.
    """

    FETCH = "fetch"
    UPDATE = "update"
    RETURN = "return"
    READ = "read"
    WRITE = "write"


DISK_KINDS = (Kind.READ, Kind.WRITE)


@dataclass(frozen=True, slots=True)
class Move:
    """One move of a page.

    Attributes:
        kind: kind of the move.
        page: number of the page.
        buffer: buffer of host memory that it uses; for reads and writes of a disk, the slot.
    """

    kind: Kind
    page: int
    buffer: int


@dataclass(frozen=True, slots=True)
class StateTraffic:
    """Bytes that a step copies.

    Attributes:
        fetched: bytes from the device to the host.
        returned: bytes from the host to the device.
        on_disk: bytes read from the disk; equally many are written to it.
    """

    fetched: int
    returned: int
    on_disk: int = 0


def step_moves(table: PageTable, on_disk: Collection[int] = ()) -> tuple[Move, ...]:
    """Return the moves of a step in the order of their start. Moves before the first fetch are reads ahead.

    ``on_disk``: pages on a disk, which are read and written.
    """
    in_order = sorted(on_disk)
    slots = {page: number % NUM_SLOTS for number, page in enumerate(in_order)}
    following = dict(zip(in_order, in_order[NUM_SLOTS:], strict=False))  # in the same slot
    moves = [Move(Kind.READ, page, slots[page]) for page in in_order[:NUM_SLOTS]]
    moves += [Move(Kind.FETCH, 0, 0)] if table.pages else []
    for page in range(len(table.pages)):
        if page + 1 < len(table.pages):
            moves.append(Move(Kind.FETCH, page + 1, (page + 1) % NUM_BUFFERS))
        moves += [Move(Kind.UPDATE, page, page % NUM_BUFFERS), Move(Kind.RETURN, page, page % NUM_BUFFERS)]
        if page in slots:
            moves.append(Move(Kind.WRITE, page, slots[page]))
        if page in following:
            moves.append(Move(Kind.READ, following[page], slots[page]))
    return tuple(moves)


def disk_bytes(table: PageTable, number: int) -> int:
    """Return the bytes of a page in all its planes. Pages on a disk are read and written whole."""
    return (NUM_MOMENTS + table.pages[number].has_copy) * table.page_bytes


def moved_bytes(page: Page, kind: Kind, element_bytes: int) -> int:
    """Return the bytes that a fetch or return copies.

    ``element_bytes``: bytes of a parameter with a float32 copy on the device.
    """
    if kind is Kind.FETCH:
        return page.num_elements * FLOAT_BYTES * (1 if page.has_copy else 2)
    return page.num_elements * (element_bytes if page.has_copy else FLOAT_BYTES)


def traffic(table: PageTable, element_bytes: int, on_disk: Collection[int] = ()) -> StateTraffic:
    """Return the bytes that a step copies; see ``moved_bytes`` and ``disk_bytes``."""
    fetched, returned = (
        sum(moved_bytes(page, kind, element_bytes) for page in table.pages) for kind in (Kind.FETCH, Kind.RETURN)
    )
    return StateTraffic(fetched, returned, sum(disk_bytes(table, number) for number in on_disk))
