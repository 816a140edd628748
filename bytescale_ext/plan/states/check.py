"""Independent validator of page tables and moves. It shares no code with the functions that make them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import NoReturn

from bytescale_ext.errors import PlanError
from bytescale_ext.plan.states.moves import DISK_KINDS, Kind, Move
from bytescale_ext.plan.states.pages import NUM_BUFFERS, Page, PageTable
from bytescale_ext.plan.states.tiers import NUM_SLOTS


def check_pages(table: PageTable) -> None:
    """Raise PlanError unless the table satisfies every rule.

    1. Each element of each tensor is in exactly one page, in order, and a plane contains each tensor without gaps.
    2. The parts of a page are packed from its start and do not exceed it.
    3. A page contains elements of one group, and either all of them have a float32 copy or none has.
    4. Pages with copies come first.
    5. A page contains parts of at most two tensors. All tensors shorter than a page count as one.

    The message contains the violated rule and the printed table, with ``>>`` before the invalid page.
    """
    length = table.page_bytes // 4
    ends: dict[int, tuple[int, int]] = {}  # elements of each tensor so far, and the position after them in the plane
    for number, page in enumerate(table.pages):
        if number and page.has_copy and not table.pages[number - 1].has_copy:
            _fail(table, number, "a page with copies comes after a page without")
        _check_page(table, number, page)
        used = 0
        for part in page.parts:
            num_checked, end = ends.get(part.tensor, (0, number * length + part.page_start))
            if part.page_start != used or used + part.num_elements > length:
                _fail(table, number, f"parts are not packed into {length} elements")
            if (part.tensor_start, number * length + part.page_start) != (num_checked, end):
                _fail(table, number, f"{table.tensors[part.tensor].name} has a gap or is in two places")
            used += part.num_elements
            ends[part.tensor] = num_checked + part.num_elements, end + part.num_elements
    for number, tensor in enumerate(table.tensors):
        if ends.get(number, (0, 0))[0] != tensor.num_elements:
            lies = f"{tensor.name} has {tensor.num_elements} elements, but {ends.get(number, (0, 0))[0]} are in pages"
            _fail(table, None, lies)


def _check_page(table: PageTable, number: int, page: Page) -> None:
    """Raise PlanError unless the tensors of a page satisfy rules 3 and 5."""
    held = [table.tensors[part.tensor] for part in page.parts]
    if not held or min(part.num_elements for part in page.parts) < 1:
        _fail(table, number, "a page or a part is empty")
    if any((tensor.group, tensor.has_copy) != (page.group, page.has_copy) for tensor in held):
        _fail(table, number, "tensors of two groups, or with and without a copy, share a page")
    is_short = [tensor.num_elements * 4 < table.page_bytes for tensor in held]
    if is_short.count(False) + any(is_short) > 2:
        _fail(table, number, "more than two tensors share a page")


def _fail(table: PageTable, number: int | None, law: str) -> NoReturn:
    """Raise PlanError with the printed table. ``number``: page to mark; None marks the heading."""
    lines = table.described().splitlines()
    marked = 0 if number is None else number + 2
    printed = "\n".join(f"{'>>' if row == marked else '  '} {line}" for row, line in enumerate(lines))
    raise PlanError(f"{law}\n{printed}")


def check_moves(table: PageTable, moves: Sequence[Move], on_disk: Collection[int] = ()) -> None:
    """Raise PlanError unless the moves update every page once and satisfy every rule.

    1. Each page is fetched, updated and returned once, in this order, with one buffer.
    2. A buffer receives a page only after its previous page has been returned.
    3. Each page on the disk is read once before its update and written once afterwards, with one slot. Other pages are
       neither read nor written.
    4. A slot receives a page only after its previous page has been written.
    5. All pages, buffers and slots exist.
    """
    _check_places(table, moves, (Kind.FETCH, Kind.UPDATE, Kind.RETURN), NUM_BUFFERS, "buffer")
    slot_of = {move.page: move.buffer for move in moves if move.kind is Kind.READ}
    through_slots = [
        Move(move.kind, move.page, slot_of[move.page] if move.kind is Kind.UPDATE else move.buffer)
        if move.kind in DISK_KINDS or (move.kind is Kind.UPDATE and move.page in slot_of)
        else None
        for move in moves
    ]
    _check_places(table, through_slots, (Kind.READ, Kind.UPDATE, Kind.WRITE), NUM_SLOTS, "slot")
    counts = Counter((move.kind, move.page) for move in moves)
    for page in range(len(table.pages)):
        for kind in Kind:
            expected = int(kind not in DISK_KINDS or page in on_disk)
            if counts[kind, page] != expected:
                _fail_moves(moves, None, f"page {page} has {counts[kind, page]} moves of kind {kind}, not {expected}")


def _check_places(
    table: PageTable, moves: Sequence[Move | None], kinds: tuple[Kind, Kind, Kind], num_places: int, name: str
) -> None:
    """Raise PlanError unless each place has one page at a time: filled, updated and emptied by moves of these kinds.

    Moves of other kinds are ignored.
    """
    first, update, last = kinds
    inside: dict[int, tuple[int, Kind]] = {}  # page of each place, and its last move
    needed = {update: first, last: update}
    for row, move in enumerate(moves):
        if move is None or move.kind not in kinds:
            continue
        if not 0 <= move.page < len(table.pages) or not 0 <= move.buffer < num_places:
            _fail_moves(moves, row, f"no such page or {name}")
        if move.kind is first:
            if move.buffer in inside:
                _fail_moves(moves, row, f"{name} {move.buffer} still has page {inside[move.buffer][0]}")
        elif inside.get(move.buffer) != (move.page, needed[move.kind]):
            _fail_moves(moves, row, f"{name} {move.buffer} does not have page {move.page} after {needed[move.kind]}")
        if move.kind is last:
            del inside[move.buffer]
        else:
            inside[move.buffer] = move.page, move.kind


def _fail_moves(moves: Sequence[Move | None], bad: int | None, law: str) -> NoReturn:
    """Raise PlanError with the printed moves and ``>>`` before the invalid move."""
    printed = "\n".join(
        f"{'>>' if row == bad else '  '} {move.kind:6} page {move.page} buffer {move.buffer}"
        for row, move in enumerate(moves)
        if move is not None
    )
    raise PlanError(f"{law}\n{printed}")
