"""Choice of the documents that stay among duplicates. It does not depend on the order of the documents."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Final

import numpy as np
import numpy.typing as npt

_PAIRED: Final = 64  # members of a bucket that are compared with all other members


@dataclass(frozen=True, eq=False, slots=True)
class KeptDocuments:
    """Documents that stay among n documents.

    Attributes:
        kept_by: kept document that represents each document, which is the document itself if it stays; int64 [n].
        copies: number of documents that each document represents, including itself; 0 if it is dropped; int64 [n].
    """

    kept_by: np.ndarray
    copies: np.ndarray


def equal_groups(rows: np.ndarray) -> np.ndarray:
    """Return for each row the row with the same text and the smallest hash of its name: int64 [n].

    ``rows``: ``shelf.ROW`` [n].
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
    """Yield the members of each chain of links (a, b), (b, c) and so on: int64 [members]. ``links``: int64 [n, 2]."""
    if not len(links):
        return
    breaks = np.flatnonzero(links[1:, 0] != links[:-1, 1]) + 1
    for part in np.split(links, breaks):
        yield np.concatenate([part[:1, 0], part[:, 1]])


def candidate_pairs(groups: Iterable[np.ndarray], first: np.ndarray, rank_of: np.ndarray) -> np.ndarray:
    """Return the unique pairs of different texts that share a bucket: int64 [n, 2], sorted.

    Args:
        groups: members of each bucket.
        first: representative of each text, from ``equal_groups``; int64 [documents].
        rank_of: rank of each document in an order that depends only on the texts; int64 [documents]. In a bucket of
            many texts, only the first ``_PAIRED`` are compared with all.
    """
    pairs: set[tuple[int, int]] = set()
    for group in groups:
        members = np.unique(first[group])
        members = members[np.argsort(rank_of[members], kind="stable")].tolist()
        leading, rest = members[:_PAIRED], members[_PAIRED:]
        pairs |= {(min(pair), max(pair)) for pair in combinations(leading, 2)}
        pairs |= {(min(a, b), max(a, b)) for a in leading for b in rest}
    return np.array(sorted(pairs), np.int64).reshape(-1, 2)


def order_of(rows: np.ndarray) -> np.ndarray:
    """Return the rank of each row in the order of choice, longest text first and then by hash: int64 [n].

    ``rows``: ``shelf.ROW`` [n].
    """
    order = np.lexsort((rows["name"], rows["low"], rows["high"], -rows["length"].astype(np.int64)))
    ranks = np.empty(len(rows), np.int64)
    ranks[order] = np.arange(len(rows))
    return ranks


def choose_kept(first: np.ndarray, rank_of: np.ndarray, pairs: np.ndarray) -> KeptDocuments:
    """Choose the documents that stay.

    Documents are visited by rank. A document stays unless a document that stays is its verified duplicate, which then
    represents it. So each dropped document resembles a kept document, and no two kept documents are duplicates.

    Args:
        first: representative of each text, from ``equal_groups``; int64 [documents].
        rank_of: rank of each document; int64 [documents].
        pairs: verified duplicates among the representatives; int64 [n, 2].
    """
    neighbours: dict[int, list[int]] = {}
    for a, b in pairs.tolist():
        neighbours.setdefault(a, []).append(b)
        neighbours.setdefault(b, []).append(a)

    def rank(document: int) -> int:
        return int(rank_of[document])

    kept_by = first.copy()
    for document in sorted(neighbours, key=rank):
        better = [other for other in neighbours[document] if rank(other) < rank(document) and kept_by[other] == other]
        if better:
            kept_by[document] = min(better, key=rank)
    kept_by = kept_by[first]  # equal texts follow their representative
    return KeptDocuments(kept_by, np.bincount(kept_by, minlength=len(first)).astype(np.int64))


def weights_of(copies: np.ndarray, most: float) -> np.ndarray:
    """Return the weight of each document, float64 [n]: 1 + ln(copies), rounded to quarters, at most ``most``.

    Repetition in independent sources is a sign of quality; the logarithm limits its effect. The rule is ours, because
    the rule of BaichuanSEED (arXiv 2408.15079) is not public. ``copies``: as in ``KeptDocuments``, [n].
    """
    quarters: npt.NDArray[np.float64] = np.round(4 * (1 + np.log(np.maximum(copies, 1)))) / 4
    weights: npt.NDArray[np.float64] = np.minimum(quarters, most)
    return weights
