"""Validator of windows: it accepts valid tables, and names the rule that a changed table violates."""

from __future__ import annotations

import numpy as np
import pytest

from bytescale_ext.errors import PlanError
from bytescale_ext.plan.sculpt.check import check_windows
from bytescale_ext.plan.sculpt.pieces import ROW

LENGTHS = np.array([7, 0, 25, 3])
STRICT = [(0, 0, 0, 7), (0, 3, 0, 3), (1, 2, 0, 10), (2, 2, 10, 10), (3, 2, 20, 5)]
SPLIT = [(0, 0, 0, 7), (0, 2, 0, 3), (1, 2, 3, 10), (2, 2, 13, 10), (3, 2, 23, 2), (3, 3, 0, 3)]
TRUNCATED = [(0, 0, 0, 7), (0, 2, 0, 3), (1, 2, 10, 10), (2, 2, 20, 1), (2, 3, 0, 3)]
TABLES = {"none": STRICT, "split": SPLIT, "truncate": TRUNCATED}


def check(rows: list[tuple[int, ...]], overflow: str, context: int = 10) -> None:
    check_windows(np.array(rows, dtype=ROW), LENGTHS, context, overflow)


@pytest.mark.parametrize("overflow", TABLES)
def test_good_tables(overflow: str) -> None:
    check(TABLES[overflow], overflow)


def test_no_rows_of_no_documents() -> None:
    check_windows(np.empty(0, dtype=ROW), np.zeros(2, dtype=np.int64), 10, "none")
    with pytest.raises(PlanError, match="windows contain 0 of 35 tokens"):
        check([], "none")


def changed(rows: list[tuple[int, ...]], index: int, column: int, value: int) -> list[tuple[int, ...]]:
    made = [list(row) for row in rows]
    made[index][column] = value
    return [tuple(row) for row in made]


MUTATIONS = {  # overflow, row, column, value, rule, invalid row
    "a gap": ("none", 4, 0, 5, "not numbered one after the other", 4),
    "back": ("none", 3, 0, 0, "not numbered one after the other", 3),
    "not from 0": ("none", 0, 0, -1, "not numbered one after the other from 0", 0),
    "no such document": ("none", 4, 1, 9, "the document does not exist", 4),
    "no document": ("none", 1, 1, -1, "the document does not exist", 1),
    "past the end": ("none", 1, 3, 4, "outside its document", 1),
    "before the start": ("none", 0, 2, -1, "outside its document", 0),
    "nothing": ("none", 4, 3, 0, "outside its document", 4),
    "too full": ("split", 3, 3, 11, "more than 10 tokens", 3),
    "twice": ("split", 2, 2, 2, "tokens of another row", 2),
    "an end is missing": ("split", 4, 3, 1, "windows contain 34 of 35 tokens", None),
    "a beginning": ("truncate", 3, 2, 21, "does not begin at a multiple of 10", 3),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_each_law_is_held(name: str) -> None:
    overflow, row, column, value, law, bad = MUTATIONS[name]
    with pytest.raises(PlanError, match=law) as error:
        check(changed(TABLES[overflow], row, column, value), overflow)
    if bad is not None:
        assert f">> row {bad}: window" in str(error.value)


def test_strict_windows_cut_no_document() -> None:
    for overflow in ("none", "truncate"):
        with pytest.raises(PlanError, match="does not begin at a multiple of 10"):
            check(SPLIT, overflow)
    with pytest.raises(PlanError, match="windows contain 24 of 35 tokens"):
        check(TRUNCATED, "none")


def test_no_piece_disappears_when_ends_are_dropped() -> None:
    with pytest.raises(PlanError, match="4 rows of 5 pieces"):
        check(TRUNCATED[:-1], "truncate")


def test_the_message_shows_the_rows_around() -> None:
    with pytest.raises(PlanError) as error:
        check(changed(STRICT, 2, 3, 11), "none")
    assert str(error.value).splitlines() == [
        "the window contains more than 10 tokens",
        "   row 0: window 0, document 0 tokens 0-7",
        "   row 1: window 0, document 3 tokens 0-3",
        ">> row 2: window 1, document 2 tokens 0-11",
        "   row 3: window 2, document 2 tokens 10-20",
        "   row 4: window 3, document 2 tokens 20-25",
    ]
