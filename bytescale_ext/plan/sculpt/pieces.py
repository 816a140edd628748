"""Pieces of documents, and the table of windows that contain them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Vectors = npt.NDArray[np.float32]
Table = npt.NDArray[np.void]

OVERFLOWS: Final = ("none", "truncate", "split")
"""Treatments of a piece that does not fit in the rest of a window: "none" does not put it there, "truncate" drops its
end, and "split" puts its end in another window."""

ROW: Final = np.dtype([("window", "<i8"), ("document", "<i8"), ("start", "<i8"), ("length", "<i8")])
"""Row of a table of windows: tokens [start, start + length) of a document. Rows are sorted by window, document and
start, unless another order of documents was asked for. Windows are numbered from 0."""


@dataclass(frozen=True, eq=False, slots=True)
class Pieces:
    """Documents split every ``context`` tokens, in the order of the corpus.

    Attributes:
        document: document of each piece, [n].
        start: first token of each piece in its document, [n].
        length: tokens of each piece, from 1 to the context; [n].
        vectors: embedding of each piece as a unit vector, [n, d].
    """

    document: Ints
    start: Ints
    length: Ints
    vectors: Vectors

    def __len__(self) -> int:
        return len(self.document)


def window_table(pieces: Pieces, window: Ints, piece: Ints, offset: Ints, length: Ints) -> Table:
    """Return the sorted table of windows for parts of pieces in any order: [parts].

    Args:
        pieces: all pieces.
        window: window of each part, [parts].
        piece: piece of each part, [parts].
        offset: first token of each part in its piece, [parts].
        length: tokens of each part, [parts].
    """
    table = np.empty(len(window), dtype=ROW)
    table["window"], table["length"] = window, length
    table["document"] = pieces.document[piece]
    table["start"] = pieces.start[piece] + offset
    return table[np.lexsort((table["start"], table["document"], table["window"]))]


def pieces_of_rows(table: Table, pieces: Pieces, context: int) -> Ints:
    """Return the piece of each row of a table: [rows]."""
    first = np.searchsorted(pieces.document, table["document"], side="left")
    numbers: Ints = first + table["start"] // context
    return numbers


def window_bounds(table: Table) -> Ints:
    """Return the first row of each window, followed by the number of rows: [windows + 1]."""
    if not len(table):
        return np.zeros(1, dtype=np.int64)
    return np.append(np.flatnonzero(np.diff(table["window"], prepend=-1)), len(table))


def related_order(table: Table, vectors: Vectors) -> Ints:
    """Return an order of the rows that puts similar documents of each window next to each other: [rows].

    A window begins with its longest row. Each row follows the row to which it is most similar among the rows that are
    left.

    Args:
        table: rows of windows, sorted by window, [rows].
        vectors: unit vector of each row, [rows, d].
    """
    order = []
    bounds = window_bounds(table)
    for first, end in pairwise(bounds.tolist()):
        products = vectors[first:end] @ vectors[first:end].T
        current = int(table["length"][first:end].argmax())
        left = np.ones(end - first, bool)
        for _ in range(end - first):
            order.append(first + current)
            left[current] = False
            current = int(np.where(left, products[current], -np.inf).argmax())
    return np.array(order, np.int64)
