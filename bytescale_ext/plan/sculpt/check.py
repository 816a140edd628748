"""Independent validator of windows. It shares no code with the builders."""

from __future__ import annotations

from typing import Final, NoReturn

import numpy as np

from bytescale_ext.errors import PlanError
from bytescale_ext.plan.sculpt.pieces import Ints, Table

_ROWS_AROUND: Final = 3


def check_windows(table: Table, lengths: Ints, context: int, overflow: str) -> None:
    """Raise PlanError unless the windows satisfy every rule.

    1. Rows are sorted by window, and windows are numbered from 0 without gaps.
    2. Each row is inside its document and contains at least one token.
    3. A window contains at most ``context`` tokens.
    4. No token is in two rows.
    5. Each token is in a row, unless ends may be dropped (``truncate``).
    6. Unless rows may be split (``split``), each row begins at a multiple of ``context`` in its document. Together with
       rule 5, ``none`` splits no document that fits in a window.
    7. With ``truncate``, a row begins at each multiple of ``context`` in a document.

    The message contains the violated rule and the rows around the first invalid row, which is marked by ``>>``.

    Args:
        table: table of windows of dtype ``ROW``, [rows].
        lengths: tokens of each document, [documents].
        context: largest number of tokens of a window.
        overflow: "none", "truncate" or "split".
    """
    steps = np.diff(table["window"], prepend=-1)
    is_first = np.arange(len(table)) == 0
    _refuse(table, (steps < is_first) | (steps > 1), "windows are not numbered one after the other from 0")
    _refuse(table, (table["document"] < 0) | (table["document"] >= len(lengths)), "the document does not exist")
    ends, size = table["start"] + table["length"], lengths[table["document"]]
    outside = (table["start"] < 0) | (table["length"] < 1) | (ends > size)
    _refuse(table, outside, "the row is empty or extends outside its document")
    tokens = np.bincount(table["window"], weights=table["length"]).astype(np.int64)
    _refuse(table, tokens[table["window"]] > context, f"the window contains more than {context} tokens")
    order = np.lexsort((table["start"], table["document"]))
    overlaps = np.zeros(len(table), dtype=bool)
    same_document = table["document"][order[1:]] == table["document"][order[:-1]]
    overlaps[order[1:]] = same_document & (table["start"][order[1:]] < ends[order[:-1]])
    _refuse(table, overlaps, "the row contains tokens of another row")
    if overflow != "truncate" and int(table["length"].sum()) != int(lengths.sum()):
        raise PlanError(f"windows contain {int(table['length'].sum())} of {int(lengths.sum())} tokens")
    if overflow != "split":
        _refuse(table, table["start"] % context != 0, f"the row does not begin at a multiple of {context}")
    pieces = int((-(-lengths // context)).sum())
    if overflow == "truncate" and len(table) != pieces:
        raise PlanError(f"{len(table)} rows of {pieces} pieces: a piece has no token in any window")


def _refuse(table: Table, invalid: np.ndarray[tuple[int, ...], np.dtype[np.bool_]], rule: str) -> None:
    """Raise PlanError if a row is invalid. ``invalid``: [rows]."""
    if invalid.any():
        _fail(table, int(invalid.argmax()), rule)


def _fail(table: Table, row: int, rule: str) -> NoReturn:
    lines = []
    for i in range(max(0, row - _ROWS_AROUND), min(len(table), row + _ROWS_AROUND + 1)):
        window, document, start, length = table[i].tolist()
        mark = ">>" if i == row else "  "
        lines.append(f"{mark} row {i}: window {window}, document {document} tokens {start}-{start + length}")
    raise PlanError("\n".join([rule, *lines]))
