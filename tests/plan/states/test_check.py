"""Validator of page tables and moves: valid values pass, and a violation of each rule is refused with its name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from bytescale_ext.errors import PlanError
from bytescale_ext.plan.states.check import check_moves, check_pages
from bytescale_ext.plan.states.moves import Kind, Move, step_moves
from bytescale_ext.plan.states.pages import Page, PagePart, PageTable, StateTensor
from tests.plan.states.tables import PAGE_BYTES, TABLE, TENSORS

MOVES = step_moves(TABLE)


def with_page(number: int, page: Page) -> PageTable:
    pages = list(TABLE.pages)
    pages[number] = page
    return replace(TABLE, pages=tuple(pages))


def with_parts(number: int, *parts: PagePart) -> PageTable:
    return with_page(number, replace(TABLE.pages[number], parts=parts))


DAMAGES: dict[str, tuple[Callable[[], PageTable], str]] = {
    "a part is left out": (lambda: with_parts(4, PagePart(3, 8, 0, 0)), "a page or a part is empty"),
    "an empty page": (lambda: with_parts(4), "a page or a part is empty"),
    "the last part is left out": (lambda: replace(TABLE, pages=TABLE.pages[:-1]), "e has 8 elements, but 0 are in"),
    "a part is held twice": (lambda: with_parts(2, PagePart(0, 3, 0, 8)), "a has a gap or is in two places"),
    "pages in another order": (
        lambda: replace(TABLE, pages=(TABLE.pages[0], TABLE.pages[2], TABLE.pages[1], *TABLE.pages[3:])),
        "a has a gap or is in two places",
    ),
    "a gap in the page": (lambda: with_parts(5, PagePart(2, 0, 1, 3)), "parts are not packed into 8 elements"),
    "more than a page": (lambda: with_parts(6, PagePart(4, 0, 0, 9)), "parts are not packed into 8 elements"),
    "two groups in a page": (
        lambda: with_parts(5, PagePart(2, 0, 0, 3), PagePart(1, 0, 3, 3)), "tensors of two groups"
    ),
    "a page of another group": (lambda: with_page(5, replace(TABLE.pages[5], group=0)), "tensors of two groups"),
    "with and without a copy": (lambda: with_page(6, replace(TABLE.pages[6], has_copy=True)), "with and without"),
    "copies come last": (
        lambda: replace(TABLE, pages=(TABLE.pages[6], *TABLE.pages[:6])), "with copies comes after a page without"
    ),
    "three long tensors in a page": (
        lambda: PageTable(
            tuple(StateTensor(name, size, 0, True) for name, size in (("x", 10), ("y", 8), ("z", 8))), PAGE_BYTES,
            (Page(0, True, (PagePart(0, 0, 0, 8),)),
             Page(0, True, (PagePart(0, 8, 0, 2), PagePart(1, 0, 2, 3), PagePart(2, 0, 5, 3)))),
        ),
        "more than two tensors share a page",
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_table_breaks_its_law(damage: str) -> None:
    check_pages(TABLE)
    make, law = DAMAGES[damage]
    with pytest.raises(PlanError, match=law):
        check_pages(make())


def test_the_bad_page_is_marked() -> None:
    with pytest.raises(PlanError) as caught:
        check_pages(with_parts(2, PagePart(0, 3, 0, 8)))
    marked = [line for line in str(caught.value).splitlines() if line.startswith(">>")]
    assert [line.split()[1] for line in marked] == ["2"]
    with pytest.raises(PlanError) as caught:
        check_pages(replace(TABLE, tensors=(*TENSORS, StateTensor("g", 1, 2, False))))
    assert ">> 7 pages of" in str(caught.value)


FETCH, UPDATE, RETURN, READ, WRITE = Kind


@pytest.mark.parametrize(
    ("moves", "law"),
    [
        (MOVES[:-1], "page 6 has 0 moves of kind return"),
        ([*MOVES, *[Move(kind, 0, 0) for kind in (FETCH, UPDATE, RETURN)]], "page 0 has 2 moves of kind fetch, not 1"),
        ([*MOVES, Move(FETCH, 7, 0)], "no such page or buffer"),
        ([*MOVES, Move(FETCH, 0, 2)], "no such page or buffer"),
        ([MOVES[0], Move(FETCH, 1, 0)], "buffer 0 still has page 0"),
        ([MOVES[0], Move(UPDATE, 0, 0), Move(FETCH, 2, 0)], "buffer 0 still has page 0"),
        ([Move(UPDATE, 0, 0)], "buffer 0 does not have page 0 after fetch"),
        ([MOVES[0], Move(RETURN, 0, 0)], "buffer 0 does not have page 0 after update"),
        ([MOVES[0], Move(UPDATE, 0, 1)], "buffer 1 does not have page 0 after fetch"),
        ([MOVES[0], Move(UPDATE, 1, 0)], "buffer 0 does not have page 1 after fetch"),
        ([MOVES[0], Move(UPDATE, 0, 0), Move(UPDATE, 0, 0)], "buffer 0 does not have page 0 after fetch"),
    ],
)
def test_damaged_moves_break_their_law(moves: list[Move], law: str) -> None:
    check_moves(TABLE, MOVES)
    with pytest.raises(PlanError, match=law):
        check_moves(TABLE, moves)


def test_the_bad_move_is_marked() -> None:
    with pytest.raises(PlanError, match=r"\n>> update page 1 buffer 0$"):
        check_moves(TABLE, [MOVES[0], Move(UPDATE, 1, 0)])


ON_DISK = {0, 1, 2, 4, 5}
WITH_DISK = step_moves(TABLE, ON_DISK)


def without(*unwanted: Move) -> list[Move]:
    return [move for move in WITH_DISK if move not in unwanted]


@pytest.mark.parametrize(
    ("moves", "law"),
    [
        (without(Move(WRITE, 5, 0)), "page 5 has 0 moves of kind write, not 1"),
        (without(Move(READ, 5, 0)), "slot 0 does not have page 5 after update"),
        (without(Move(READ, 5, 0), Move(WRITE, 5, 0)), "page 5 has 0 moves of kind read, not 1"),
        ([*WITH_DISK, Move(READ, 5, 1), Move(WRITE, 5, 1)], "slot 1 does not have page 5 after "),
        ([Move(READ, 0, 0), Move(READ, 1, 0)], "slot 0 still has page 0"),
        ([Move(READ, 0, 4)], "no such page or slot"),
        ([Move(READ, 0, 0), Move(WRITE, 0, 0)], "slot 0 does not have page 0 after update"),
        (
            [FETCH_0 := Move(FETCH, 0, 0), Move(UPDATE, 0, 0), Move(READ, 0, 0)],
            "slot 0 does not have page 0 after read",
        ),
        ([FETCH_0, Move(READ, 0, 2), Move(UPDATE, 0, 0), Move(WRITE, 0, 1)], "slot 1 does not have page 0 after"),
    ],
)
def test_damaged_moves_of_a_disk_break_their_law(moves: list[Move], law: str) -> None:
    check_moves(TABLE, WITH_DISK, ON_DISK)
    with pytest.raises(PlanError, match=law):
        check_moves(TABLE, moves, ON_DISK)
    with pytest.raises(PlanError, match="page 5 has 1 moves of kind read, not 0"):
        check_moves(TABLE, WITH_DISK, ON_DISK - {5})
