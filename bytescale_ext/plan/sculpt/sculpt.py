"""Windows of related pieces (DataSculpt, arXiv 2409.00997): clusters, greedy fit, best fit for the rest, exchanges.

This differs from the paper in four ways:

- Tokens are dropped only with ``overflow="truncate"``.
- Pieces that do not fit in the windows of their cluster are clustered again.
- No fixed threshold of similarity is needed (``clusters.py``).
- Windows exchange parts at the end, which undoes most of the mixing that best fit does (``exchange.py``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np

from bytescale_ext.plan.sculpt.clusters import ClusterSettings, Nearest, find_clusters, nearest_exact
from bytescale_ext.plan.sculpt.exchange import exchanged
from bytescale_ext.plan.sculpt.largest_fit import OpenWindows, best_fit, largest_fit
from bytescale_ext.plan.sculpt.pieces import OVERFLOWS, Ints, Pieces, Table, window_table

_CHOICES: Final = 256  # windows that are compared by similarity for a remaining piece, see ``best_fit``


@dataclass(frozen=True, slots=True)
class SculptSettings:
    """Settings of windows.

    Attributes:
        context: largest number of tokens of a window.
        overflow: one of ``OVERFLOWS``.
        seed: seed of the clusters; equal seeds give equal windows.
        clusters: settings of the clustering.

    Raises:
        ValueError: the context is below 1, or the overflow is unknown.
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
    """Windows, and the clusters of their pieces.

    Attributes:
        table: table of windows of dtype ``ROW``, [rows].
        cluster: cluster of each piece in the first round, [pieces].
    """

    table: Table
    cluster: Ints


def sculpt(pieces: Pieces, settings: SculptSettings, nearest: Nearest = nearest_exact) -> Sculpted:
    """Return windows of related pieces. Each token is in exactly one window, unless ``overflow`` is "truncate".

    Pieces that remain after a round of clusters are clustered again, as long as they can fill windows.

    Args:
        pieces: documents split every ``settings.context`` tokens.
        settings: settings of the windows.
        nearest: function that returns the nearest centres.
    """
    context, parts = settings.context, _Parts(pieces, settings)
    remaining = np.arange(len(pieces))
    first: Ints | None = None
    while True:
        tokens = parts.rest[remaining]
        cluster = find_clusters(pieces.vectors[remaining], tokens, context, settings.clusters, settings.seed, nearest)
        first = cluster if first is None else first
        order = np.argsort(cluster, kind="stable")
        for members in np.split(remaining[order], np.cumsum(np.bincount(cluster))[:-1]):
            parts.fill(members)
        remaining = np.flatnonzero(parts.rest)
        if not context <= int(parts.rest[remaining].sum()) < int(tokens.sum()):
            break
    parts.fit(remaining)
    return Sculpted(parts.table(), first)


class _Parts:
    """Parts of pieces that are already in windows, during the assignment.

    Attributes:
        rest: number of unassigned tokens of each piece, which are at its end; [pieces].
    """

    def __init__(self, pieces: Pieces, settings: SculptSettings) -> None:
        self._pieces = pieces
        self._settings = settings
        self._num_windows = 0
        self._made: list[tuple[Ints, Ints, Ints, Ints]] = []  # window, piece, offset, length
        self.rest = pieces.length.copy()

    def fill(self, members: Ints) -> None:
        """Fill windows with the pieces of one cluster. ``members``: numbers of the pieces, [members]."""
        vectors, overflow = self._pieces.vectors[members], self._settings.overflow
        window, taken = largest_fit(self.rest[members], vectors, self._settings.context, overflow)
        placed = window >= 0
        self._add(window[placed] + self._num_windows, members[placed], taken[placed])
        if overflow == "truncate":
            self.rest[members[placed]] = 0
        self._num_windows += int(window.max()) + 1

    def fit(self, remaining: Ints) -> None:
        """Assign the remaining pieces by best fit. ``remaining``: numbers of the pieces, [n]."""
        context, vectors = self._settings.context, self._pieces.vectors
        room = np.full(self._num_windows, context, dtype=np.int64)
        sums = np.zeros((self._num_windows, vectors.shape[1]), dtype=np.float32)
        for window, piece, _, length in self._made:
            np.subtract.at(room, window, length)
            np.add.at(sums, window, vectors[piece])
        open_windows = OpenWindows(context, room, sums)
        window = best_fit(self.rest[remaining], vectors[remaining], open_windows, _CHOICES)
        self._add(window, remaining, self.rest[remaining])

    def table(self) -> Table:
        """Return the table of all parts, after the windows have exchanged parts: [rows]."""
        window, piece, offset, length = (np.concatenate(column) for column in zip(*self._made, strict=True))
        window = exchanged(window, length, self._pieces.vectors[piece], self._settings.context)
        return window_table(self._pieces, window, piece, offset, length)

    def _add(self, window: Ints, piece: Ints, length: Ints) -> None:
        self._made.append((window, piece, self._pieces.length[piece] - self.rest[piece], length))
        self.rest[piece] -= length
