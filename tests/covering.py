"""Covering arrays: few sets of features that together contain every pair of features."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

Names = tuple[str, ...]


def covering_array(features: Sequence[str], fits: Callable[[Names], bool]) -> list[Names]:
    """Return sets of features: each pair that fits is in one of them at least.

    A set begins with the first pair that no set has, and grows by the feature that adds most such pairs. Equal
    arguments give equal sets.

    Args:
        features: the features; sets keep their order.
        fits: whether these features go together. Each part of a set that fits must fit as well.
    """
    left = {pair for pair in itertools.combinations(features, 2) if fits(pair)}
    rows: list[Names] = []
    while left:
        row: Names = min(left, key=lambda pair: (features.index(pair[0]), features.index(pair[1])))
        left -= pairs_of(row)
        while True:
            wider = [in_order(features, (*row, name)) for name in features if name not in row]
            gains = [(len(left & pairs_of(names)), names) for names in wider if fits(names)]
            gain, best = max(gains, key=lambda row: row[0], default=(0, row))
            if not gain:
                break
            row = best
            left -= pairs_of(row)
        rows.append(row)
    return rows


def pairs_of(names: Names) -> set[tuple[str, str]]:
    """Return the pairs of a set, which has the order of the features."""
    return set(itertools.combinations(names, 2))


def in_order(features: Sequence[str], names: Names) -> Names:
    """Return some features in the order of all features."""
    return tuple(sorted(names, key=features.index))
