"""Quality metrics of windows: fill, similarity of the pieces in a window, and split pieces."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bytescale_ext.plan.sculpt.pieces import Ints, Pieces, Table, Vectors, pieces_of_rows


@dataclass(frozen=True, slots=True)
class Quality:
    """Quality metrics of a table of windows.

    Attributes:
        num_windows: number of windows.
        fill: fraction of the windows' tokens that documents fill.
        relevance: mean cosine of two pieces in a window, averaged over windows with several pieces; 0 if none has.
        random_relevance: mean cosine of any two pieces of the corpus.
        cut: fraction of pieces that no window contains whole.
        documents_per_window: mean number of documents in a window.
        tokens_kept: fraction of the corpus's tokens that are in a window.
    """

    num_windows: int
    fill: float
    relevance: float
    random_relevance: float
    cut: float
    documents_per_window: float
    tokens_kept: float


def quality_of(table: Table, pieces: Pieces, context: int) -> Quality:
    """Return the quality of windows. ``table``: table of windows with at least one row, [rows]."""
    num_windows = int(table["window"][-1]) + 1
    piece = pieces_of_rows(table, pieces, context)
    tokens = int(table["length"].sum())
    whole = np.zeros(len(pieces), dtype=bool)
    whole[piece[table["length"] == pieces.length[piece]]] = True
    pairs = np.unique(np.stack([table["window"], table["document"]]), axis=1)
    everything = np.zeros(len(pieces), dtype=np.int64)
    return Quality(
        num_windows=num_windows,
        fill=tokens / (num_windows * context),
        relevance=mean_cosine(pieces.vectors[piece], table["window"]),
        random_relevance=mean_cosine(pieces.vectors, everything),
        cut=1.0 - float(whole.mean()),
        documents_per_window=pairs.shape[1] / num_windows,
        tokens_kept=tokens / int(pieces.length.sum()),
    )


def mean_cosine(vectors: Vectors, group: Ints) -> float:
    """Return the mean cosine of two vectors of a group, averaged over groups with several vectors; 0 if none has.

    Args:
        vectors: unit vectors or zeros, [n, d].
        group: group of each vector, ascending; [n].
    """
    _, first, count = np.unique(group, return_index=True, return_counts=True)
    sums = np.add.reduceat(vectors.astype(np.float64), first, axis=0)
    squares = np.add.reduceat(np.sum(vectors.astype(np.float64) ** 2, axis=1), first)
    several = count >= 2
    if not several.any():
        return 0.0
    of_pairs = (np.sum(sums**2, axis=1) - squares)[several] / (count * (count - 1))[several]
    return float(of_pairs.mean())
