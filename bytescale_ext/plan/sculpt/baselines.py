"""Other ways to make windows, to compare with: Megatron's concatenation, best fit, a path of nearest neighbours."""

from __future__ import annotations

import numpy as np

from bytescale_ext.plan.sculpt.largest_fit import OpenWindows, best_fit
from bytescale_ext.plan.sculpt.pieces import Ints, Pieces, Table, table_of


def concatenated(pieces: Pieces, context: int, seed: int) -> Table:
    """Return the windows of shuffled documents laid end to end and cut every ``context`` tokens [rows].

    So Megatron's ``GPTDataset`` makes its samples.
    """
    num_documents = int(pieces.document[-1]) + 1
    rank = np.random.RandomState(seed % 2**32).permutation(num_documents)
    return _end_to_end(pieces, np.lexsort((pieces.start, rank[pieces.document])), context)


def fitted(pieces: Pieces, context: int) -> Table:
    """Return the windows of best-fit packing [rows], which looks at lengths alone (arXiv 2404.10830)."""
    everything = np.arange(len(pieces))
    none_open = OpenWindows(context, everything[:0], pieces.vectors[:0])
    window = best_fit(pieces.length, pieces.vectors, none_open)
    return table_of(pieces, window, everything, np.zeros_like(everything), pieces.length)


def neighbour_path(pieces: Pieces, context: int) -> Table:
    """Return the windows of a path [rows] from each piece to the nearest one not yet visited, laid end to end.

    In-context pretraining orders documents so (arXiv 2310.10638). Takes O(n^2) time, so it is for comparisons.
    """
    free = np.ones(len(pieces), dtype=bool)
    order, at = np.empty(len(pieces), dtype=np.int64), 0
    for i in range(len(pieces)):
        order[i] = at
        free[at] = False
        if i + 1 < len(pieces):
            at = int(np.where(free, pieces.vectors @ pieces.vectors[at], -np.inf).argmax())
    return _end_to_end(pieces, order, context)


def _end_to_end(pieces: Pieces, order: Ints, context: int) -> Table:
    """Return the windows [rows] of pieces in an order [n], cut every ``context`` tokens."""
    ends = np.cumsum(pieces.length[order])
    cuts = np.union1d(ends, np.arange(context, int(ends[-1]), context))  # where a part ends
    place = np.searchsorted(ends, cuts, side="left")
    begins = np.concatenate([[0], cuts[:-1]])
    piece = order[place]
    return table_of(
        pieces,
        window=begins // context,
        piece=piece,
        offset=begins - (ends[place] - pieces.length[piece]),
        length=cuts - begins,
    )
