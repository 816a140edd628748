"""Which documents of a set with verified duplicates stay. Pure, and independent of the order of the documents."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Final

import numpy as np
import numpy.typing as npt

_PAIRED: Final = 64  # members of a bucket that are compared with all others of it


@dataclass(frozen=True, eq=False, slots=True)
class Kept:
    """What stays of n documents.

    Attributes:
        kept_by: int64 [n] the document that stands for each one; itself where it stays.
        copies: int64 [n] documents that each one stands for, itself included; 0 where it goes.
    """

    kept_by: np.ndarray
    copies: np.ndarray


def equal_groups(rows: np.ndarray) -> np.ndarray:
    """Return for each row [n] the row with the same text whose name has the least hash: int64 [n].

    ``rows``: records with ``high``, ``low`` and ``name``, as ``shelf.ROW``.
    """
    order = np.lexsort((np.arange(len(rows)), rows["name"], rows["low"], rows["high"]))
    sorted_rows = rows[order]
    begins = np.ones(len(rows), bool)
    begins[1:] = (sorted_rows["high"][1:] != sorted_rows["high"][:-1]) | (
        sorted_rows["low"][1:] != sorted_rows["low"][:-1]
    )
    first = np.empty(len(rows), np.int64)
    first[order] = order[np.maximum.accumulate(np.where(begins, np.arange(len(rows)), 0))]
    return first


def chained_groups(links: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the members of each run of links (a, b), (b, c) and so on: int64 [members]. ``links``: int64 [n, 2]."""
    if not len(links):
        return
    breaks = np.flatnonzero(links[1:, 0] != links[:-1, 1]) + 1
    for part in np.split(links, breaks):
        yield np.concatenate([part[:1, 0], part[:, 1]])


def candidate_pairs(groups: Iterable[np.ndarray], first: np.ndarray, rank_of: np.ndarray) -> np.ndarray:
    """Return the pairs of different texts that share a bucket: int64 [n, 2], sorted, each once.

    Args:
        groups: members of each bucket.
        first: as ``equal_groups`` returns it, int64 [documents].
        rank_of: int64 [documents] place of each document in an order that depends on the texts alone. In a bucket of
            many texts, the first ``_PAIRED`` are compared with all.
    """
    pairs: set[tuple[int, int]] = set()
    for group in groups:
        members = np.unique(first[group])
        members = members[np.argsort(rank_of[members], kind="stable")].tolist()
        ahead, rest = members[:_PAIRED], members[_PAIRED:]
        pairs |= {(min(pair), max(pair)) for pair in combinations(ahead, 2)}
        pairs |= {(min(one, other), max(one, other)) for one in ahead for other in rest}
    return np.array(sorted(pairs), np.int64).reshape(-1, 2)


def order_of(rows: np.ndarray) -> np.ndarray:
    """Return the place of each row [n] in the order of choice: the longest text first, then by hash. int64 [n]."""
    order = np.lexsort((rows["name"], rows["low"], rows["high"], -rows["length"].astype(np.int64)))
    places = np.empty(len(rows), np.int64)
    places[order] = np.arange(len(rows))
    return places


def choose(first: np.ndarray, rank_of: np.ndarray, pairs: np.ndarray) -> Kept:
    """Return which documents stay.

    In the order of choice a document stays unless one that stays is its verified duplicate; then that one stands for
    it. So each document that goes resembles one that stays, and no two that stay are duplicates.

    Args:
        first: int64 [documents] the document of the same text that stands for each.
        rank_of: int64 [documents] the order of choice.
        pairs: int64 [n, 2] verified duplicates among those that stand for themselves.
    """
    neighbours: dict[int, list[int]] = {}
    for one, other in pairs.tolist():
        neighbours.setdefault(one, []).append(other)
        neighbours.setdefault(other, []).append(one)
    kept_by = first.copy()
    for document in sorted(neighbours, key=lambda one: int(rank_of[one])):
        better = [one for one in neighbours[document] if rank_of[one] < rank_of[document] and kept_by[one] == one]
        if better:
            kept_by[document] = min(better, key=lambda one: int(rank_of[one]))
    kept_by = kept_by[first]  # equal texts follow the one that stands for them
    return Kept(kept_by, np.bincount(kept_by, minlength=len(first)).astype(np.int64))


def weights_of(copies: np.ndarray, most: float) -> np.ndarray:
    """Return the weight of each document [n] that stands for ``copies``: 1 + ln(copies) in quarters, at most ``most``.

    Repetition in independent sources is a sign of quality; its logarithm keeps it from ruling (our choice, the rule of
    BaichuanSEED, arXiv 2408.15079, is not public). float64 [n].
    """
    quarters: npt.NDArray[np.float64] = np.round(4 * (1 + np.log(np.maximum(copies, 1)))) / 4
    weights: npt.NDArray[np.float64] = np.minimum(quarters, most)
    return weights
