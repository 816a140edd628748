"""Simpler builders of windows, for comparison: Megatron's concatenation, best fit, a path of nearest neighbours."""

from __future__ import annotations

import numpy as np

from bytescale_ext.plan.sculpt.largest_fit import OpenWindows, best_fit
from bytescale_ext.plan.sculpt.pieces import Ints, Pieces, Table, window_table


def concatenated(pieces: Pieces, context: int, seed: int) -> Table:
    """Return windows of shuffled documents: [rows]. Documents are concatenated and split every ``context`` tokens.

    Megatron's ``GPTDataset`` makes its samples in this way.
    """
    num_documents = int(pieces.document[-1]) + 1
    rank = np.random.RandomState(seed % 2**32).permutation(num_documents)
    return _end_to_end(pieces, np.lexsort((pieces.start, rank[pieces.document])), context)


def fitted(pieces: Pieces, context: int) -> Table:
    """Return windows made by best-fit packing, which considers only lengths (arXiv 2404.10830): [rows]."""
    everything = np.arange(len(pieces))
    none_open = OpenWindows(context, everything[:0], pieces.vectors[:0])
    window = best_fit(pieces.length, pieces.vectors, none_open)
    return window_table(pieces, window, everything, np.zeros_like(everything), pieces.length)


def neighbour_path(pieces: Pieces, context: int) -> Table:
    """Return windows of a path that moves from each piece to the nearest unvisited piece: [rows].

    In-context pretraining orders documents in this way (arXiv 2310.10638). It takes O(n^2) time, so it is only for
    comparison.
    """
    free = np.ones(len(pieces), dtype=bool)
    order, current = np.empty(len(pieces), dtype=np.int64), 0
    for i in range(len(pieces)):
        order[i] = current
        free[current] = False
        if i + 1 < len(pieces):
            current = int(np.where(free, pieces.vectors @ pieces.vectors[current], -np.inf).argmax())
    return _end_to_end(pieces, order, context)


def _end_to_end(pieces: Pieces, order: Ints, context: int) -> Table:
    """Return windows of concatenated pieces, split every ``context`` tokens: [rows]. ``order``: piece numbers, [n]."""
    ends = np.cumsum(pieces.length[order])
    part_ends = np.union1d(ends, np.arange(context, int(ends[-1]), context))
    position = np.searchsorted(ends, part_ends, side="left")
    begins = np.concatenate([[0], part_ends[:-1]])
    piece = order[position]
    return window_table(
        pieces,
        window=begins // context,
        piece=piece,
        offset=begins - (ends[position] - pieces.length[piece]),
        length=part_ends - begins,
    )
