"""Quality metrics of windows: fill, similarity of the pieces in a window, and split pieces."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

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


@dataclass(frozen=True, slots=True)
class QualitySums:
    """Sums for ``Quality``. The sums of disjoint windows and pieces add up.

    Attributes:
        num_windows, tokens: number of windows, and their tokens.
        documents: number of documents of each window, summed.
        num_pieces, piece_tokens, num_whole: pieces, their tokens, and the pieces that a window contains whole.
        cosines, several: sum of the mean cosines of windows with several pieces, and the number of these windows.
        vectors: sum of the vectors of all pieces, [d].
        squares: sum of their squared lengths.
    """

    num_windows: int
    tokens: int
    documents: int
    num_pieces: int
    piece_tokens: int
    num_whole: int
    cosines: float
    several: int
    vectors: tuple[float, ...]
    squares: float

    def __add__(self, other: QualitySums) -> QualitySums:
        return QualitySums(
            num_windows=self.num_windows + other.num_windows,
            tokens=self.tokens + other.tokens,
            documents=self.documents + other.documents,
            num_pieces=self.num_pieces + other.num_pieces,
            piece_tokens=self.piece_tokens + other.piece_tokens,
            num_whole=self.num_whole + other.num_whole,
            cosines=self.cosines + other.cosines,
            several=self.several + other.several,
            vectors=tuple(a + b for a, b in zip(self.vectors, other.vectors, strict=True)),
            squares=self.squares + other.squares,
        )

    def quality(self, context: int) -> Quality:
        """Return the quality of windows of ``context`` tokens."""
        square_of_sum = sum(value * value for value in self.vectors)
        num_pairs = self.num_pieces * (self.num_pieces - 1)
        return Quality(
            num_windows=self.num_windows,
            fill=self.tokens / (self.num_windows * context),
            relevance=self.cosines / self.several if self.several else 0.0,
            random_relevance=(square_of_sum - self.squares) / num_pairs if num_pairs else 0.0,
            cut=1.0 - self.num_whole / self.num_pieces,
            documents_per_window=self.documents / self.num_windows,
            tokens_kept=self.tokens / self.piece_tokens,
        )


def quality_of(table: Table, pieces: Pieces, context: int) -> Quality:
    """Return the quality of windows. ``table``: table of windows with at least one row, [rows]."""
    return quality_sums(table, pieces, pieces_of_rows(table, pieces, context)).quality(context)


def quality_sums(table: Table, pieces: Pieces, piece: Ints) -> QualitySums:
    """Return the sums of windows.

    Args:
        table: table of windows with at least one row, [rows].
        pieces: all pieces of these windows.
        piece: piece of each row, [rows].
    """
    whole = np.zeros(len(pieces), dtype=bool)
    whole[piece[table["length"] == pieces.length[piece]]] = True
    pairs = np.unique(np.stack([table["window"], table["document"]]), axis=1)
    cosines = mean_cosines(pieces.vectors[piece], table["window"])
    vectors = pieces.vectors.astype(np.float64)
    return QualitySums(
        num_windows=int(table["window"][-1]) + 1,
        tokens=int(table["length"].sum()),
        documents=pairs.shape[1],
        num_pieces=len(pieces),
        piece_tokens=int(pieces.length.sum()),
        num_whole=int(whole.sum()),
        cosines=float(cosines.sum()),
        several=len(cosines),
        vectors=tuple(vectors.sum(axis=0).tolist()),
        squares=float((vectors**2).sum()),
    )


def mean_cosine(vectors: Vectors, group: Ints) -> float:
    """Return the average of ``mean_cosines`` of vectors [n, d] in groups [n]; 0 if no group has several vectors."""
    cosines = mean_cosines(vectors, group)
    return float(cosines.mean()) if len(cosines) else 0.0


def mean_cosines(vectors: Vectors, group: Ints) -> npt.NDArray[np.float64]:
    """Return the mean cosine of two vectors of a group, for each group with several vectors: float64 [groups].

    Args:
        vectors: unit vectors or zeros, [n, d].
        group: group of each vector, ascending; [n].
    """
    _, first, count = np.unique(group, return_index=True, return_counts=True)
    sums = np.add.reduceat(vectors.astype(np.float64), first, axis=0)
    squares = np.add.reduceat(np.sum(vectors.astype(np.float64) ** 2, axis=1), first)
    several = count >= 2
    cosines: npt.NDArray[np.float64] = (np.sum(sums**2, axis=1) - squares)[several] / (count * (count - 1))[several]
    return cosines
