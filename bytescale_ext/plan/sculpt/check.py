"""The independent validator of windows. It shares no code with the builders."""

from __future__ import annotations

from typing import Final, NoReturn

import numpy as np

from bytescale_ext.errors import PlanError
from bytescale_ext.plan.sculpt.pieces import Ints, Table

_ROWS_AROUND: Final = 3


def check_windows(table: Table, lengths: Ints, context: int, overflow: str) -> None:
    """Raise PlanError unless the windows keep every law.

    1. Rows are sorted by window, and windows are numbered from 0 without a gap.
    2. Each row lies inside its document and holds a token.
    3. A window holds at most ``context`` tokens.
    4. No token is in two rows.
    5. Each token is in a row, unless ends may be dropped (``truncate``).
    6. Unless rows may be split (``split``), each begins at a multiple of ``context`` in its document. With 5 it follows
       that ``none`` cuts no document that fits in a window.
    7. With ``truncate`` there is a row at each such multiple.

    The message holds the law and the rows around the bad one, which ``>>`` marks.

    Args:
        table: [rows] of the dtype ``ROW``.
        lengths: [documents] tokens of each document.
        context: the most tokens of a window.
        overflow: "none", "truncate" or "split".
    """
    steps = np.diff(table["window"], prepend=-1)
    is_first = np.arange(len(table)) == 0
    _refuse(table, (steps < is_first) | (steps > 1), "windows are not numbered one after the other from 0")
    _refuse(table, (table["document"] < 0) | (table["document"] >= len(lengths)), "there is no such document")
    ends, size = table["start"] + table["length"], lengths[table["document"]]
    _refuse(table, (table["start"] < 0) | (table["length"] < 1) | (ends > size), "the row lies outside its document")
    tokens = np.bincount(table["window"], weights=table["length"]).astype(np.int64)
    _refuse(table, tokens[table["window"]] > context, f"the window holds more than {context} tokens")
    order = np.lexsort((table["start"], table["document"]))
    again = np.zeros(len(table), dtype=bool)
    same = table["document"][order[1:]] == table["document"][order[:-1]]
    again[order[1:]] = same & (table["start"][order[1:]] < ends[order[:-1]])
    _refuse(table, again, "the row holds tokens of another row")
    if overflow != "truncate" and int(table["length"].sum()) != int(lengths.sum()):
        raise PlanError(f"windows hold {int(table['length'].sum())} of {int(lengths.sum())} tokens")
    if overflow != "split":
        _refuse(table, table["start"] % context != 0, f"the row does not begin at a multiple of {context}")
    pieces = int((-(-lengths // context)).sum())
    if overflow == "truncate" and len(table) != pieces:
        raise PlanError(f"{len(table)} rows of {pieces} pieces: a piece has no token in any window")


def _refuse(table: Table, bad: np.ndarray[tuple[int, ...], np.dtype[np.bool_]], law: str) -> None:
    """Raise PlanError if a row is bad. ``bad``: [rows]."""
    if bad.any():
        _fail(table, int(bad.argmax()), law)


def _fail(table: Table, row: int, law: str) -> NoReturn:
    lines = []
    for i in range(max(0, row - _ROWS_AROUND), min(len(table), row + _ROWS_AROUND + 1)):
        window, document, start, length = table[i].tolist()
        mark = ">>" if i == row else "  "
        lines.append(f"{mark} row {i}: window {window}, document {document} tokens {start}-{start + length}")
    raise PlanError("\n".join([law, *lines]))
