"""Pieces of documents, and windows made of them as the rows of one table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Vectors = npt.NDArray[np.float32]
Table = npt.NDArray[np.void]

OVERFLOWS: Final = ("none", "truncate", "split")
"""What happens to the end of a piece that its window has no room for: the piece does not go there; the end is dropped;
the end goes to another window."""

ROW: Final = np.dtype([("window", "<i8"), ("document", "<i8"), ("start", "<i8"), ("length", "<i8")])
"""A row of a table of windows: tokens [start, start + length) of a document. Rows are sorted by window, then by
document and start; windows are numbered from 0."""


@dataclass(frozen=True, eq=False, slots=True)
class Pieces:
    """Documents cut at every ``context`` tokens, in the order of the corpus: what windows are made of.

    Attributes:
        document: [n] number of the document.
        start: [n] first token in the document.
        length: [n] tokens, from 1 to the context.
        vectors: [n, d] what each piece is about, as unit vectors.
    """

    document: Ints
    start: Ints
    length: Ints
    vectors: Vectors

    def __len__(self) -> int:
        return len(self.document)


def table_of(pieces: Pieces, window: Ints, piece: Ints, offset: Ints, length: Ints) -> Table:
    """Return the table of windows [parts] from parts of pieces, in any order.

    Args:
        pieces: the pieces.
        window: [parts] number of the window of each part.
        piece: [parts] its piece.
        offset: [parts] its first token in the piece.
        length: [parts] its tokens.
    """
    table = np.empty(len(window), dtype=ROW)
    table["window"], table["length"] = window, length
    table["document"] = pieces.document[piece]
    table["start"] = pieces.start[piece] + offset
    return table[np.lexsort((table["start"], table["document"], table["window"]))]


def pieces_of_rows(table: Table, pieces: Pieces, context: int) -> Ints:
    """Return the piece of each row [rows] of a table."""
    first = np.searchsorted(pieces.document, table["document"], side="left")
    found: Ints = first + table["start"] // context
    return found


def window_bounds(table: Table) -> Ints:
    """Return the first row of each window, then the number of rows: [windows + 1]."""
    if not len(table):
        return np.zeros(1, dtype=np.int64)
    return np.append(np.flatnonzero(np.diff(table["window"], prepend=-1)), len(table))
