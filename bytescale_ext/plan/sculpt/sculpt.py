"""Windows of related pieces (DataSculpt, arXiv 2409.00997): clusters, a greedy fit inside each, best fit for the rest.

Departures from the paper: nothing is dropped but by ``overflow="truncate"``; what clusters leave over is clustered
again; no fixed threshold of similarity is needed (``clusters.py``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np

from bytescale_ext.plan.sculpt.clusters import ClusterSettings, Nearest, find_clusters, nearest_exact
from bytescale_ext.plan.sculpt.largest_fit import OpenWindows, best_fit, largest_fit
from bytescale_ext.plan.sculpt.pieces import OVERFLOWS, Ints, Pieces, Table, table_of

_CHOICES: Final = 256  # fullest windows among which a piece that is left over finds the most similar one


@dataclass(frozen=True, slots=True)
class SculptSettings:
    """What windows there shall be.

    Attributes:
        context: the most tokens of a window.
        overflow: one of ``OVERFLOWS``.
        seed: of the clusters; equal seeds give equal windows.
        clusters: how clusters are found.

    Raises:
        ValueError: a context below 1, or another overflow.
    """

    context: int
    overflow: str = "none"
    seed: int = 1234
    clusters: ClusterSettings = field(default_factory=ClusterSettings)

    def __post_init__(self) -> None:
        if self.context < 1:
            raise ValueError(f"a context of {self.context} tokens: give 1 or more")
        if self.overflow not in OVERFLOWS:
            raise ValueError(f"overflow {self.overflow!r} is unknown: give {', '.join(OVERFLOWS)}")


@dataclass(frozen=True, eq=False, slots=True)
class Sculpted:
    """Windows, and the clusters that they were made in.

    Attributes:
        table: rows [rows] of the dtype ``ROW``.
        cluster: [pieces] cluster of each piece in the first round.
    """

    table: Table
    cluster: Ints


def sculpt(pieces: Pieces, settings: SculptSettings, nearest: Nearest = nearest_exact) -> Sculpted:
    """Return windows of related pieces. Each token is in exactly one of them, unless ``overflow`` is "truncate".

    What a round of clusters leaves over is clustered again, as long as it can fill windows.

    Args:
        pieces: documents cut at ``settings.context``.
        settings: what windows there shall be.
        nearest: finds nearest centres.
    """
    context, parts = settings.context, _Parts(pieces, settings)
    left = np.arange(len(pieces))
    first: Ints | None = None
    while True:
        tokens = parts.rest[left]
        cluster = find_clusters(pieces.vectors[left], tokens, context, settings.clusters, settings.seed, nearest)
        first = cluster if first is None else first
        order = np.argsort(cluster, kind="stable")
        for members in np.split(left[order], np.cumsum(np.bincount(cluster))[:-1]):
            parts.fill(members)
        left = np.flatnonzero(parts.rest)
        if not context <= int(parts.rest[left].sum()) < int(tokens.sum()):
            break
    parts.fit(left)
    return Sculpted(parts.table(), first)


class _Parts:
    """Parts of pieces in windows, while they are made.

    Attributes:
        rest: [pieces] tokens of each piece that are still to be placed, from its end.
    """

    def __init__(self, pieces: Pieces, settings: SculptSettings) -> None:
        self._pieces = pieces
        self._settings = settings
        self._num_windows = 0
        self._made: list[tuple[Ints, Ints, Ints, Ints]] = []  # window, piece, offset, length
        self.rest = pieces.length.copy()

    def fill(self, members: Ints) -> None:
        """Fill windows with pieces [members] of one cluster."""
        vectors, overflow = self._pieces.vectors[members], self._settings.overflow
        window, taken = largest_fit(self.rest[members], vectors, self._settings.context, overflow)
        placed = window >= 0
        self._add(window[placed] + self._num_windows, members[placed], taken[placed])
        if overflow == "truncate":
            self.rest[members[placed]] = 0
        self._num_windows += int(window.max()) + 1

    def fit(self, left: Ints) -> None:
        """Put pieces [left] where they fit."""
        context, vectors = self._settings.context, self._pieces.vectors
        room = np.full(self._num_windows, context, dtype=np.int64)
        sums = np.zeros((self._num_windows, vectors.shape[1]), dtype=np.float32)
        for window, piece, _, length in self._made:
            np.subtract.at(room, window, length)
            np.add.at(sums, window, vectors[piece])
        window = best_fit(self.rest[left], vectors[left], OpenWindows(context, room, sums), _CHOICES)
        self._add(window, left, self.rest[left])

    def table(self) -> Table:
        """Return the table of all parts [rows]."""
        window, piece, offset, length = (np.concatenate(column) for column in zip(*self._made, strict=True))
        return table_of(self._pieces, window, piece, offset, length)

    def _add(self, window: Ints, piece: Ints, length: Ints) -> None:
        self._made.append((window, piece, self._pieces.length[piece] - self.rest[piece], length))
        self.rest[piece] -= length
