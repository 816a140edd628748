"""Choice of the documents that stay among duplicates. It does not depend on the order of the documents."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

_PAIRED: Final = 64  # members of a bucket that are compared with all other members


def chained_groups(links: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the members of each chain of links (a, b), (b, c) and so on: int64 [members]. ``links``: int64 [n, 2]."""
    if not len(links):
        return
    breaks = np.flatnonzero(links[1:, 0] != links[:-1, 1]) + 1
    for part in np.split(links, breaks):
        yield np.concatenate([part[:1, 0], part[:, 1]])


def candidate_pairs(members: np.ndarray) -> np.ndarray:
    """Return the pairs (worse, better) of the members of a bucket that are compared: int64 [pairs, 2].

    Of many members, only the first ``_PAIRED`` are compared with all. ``members``: numbers of documents, the best
    first, int64 [members].
    """
    order = np.arange(len(members))
    better, worse = np.nonzero(order[:_PAIRED, None] < order)
    return np.stack([members[worse], members[better]], axis=1)


def dropping_pairs(worse: np.ndarray, better: np.ndarray, is_dropped: np.ndarray) -> np.ndarray:
    """Return the pairs whose worse document is dropped for its better document: int64 [dropped], ascending.

    Documents are visited by rank. A document stays unless a document that stays is its verified duplicate. So each
    dropped document resembles a kept document, and no two kept documents are duplicates.

    Args:
        worse, better: documents of verified pairs, int64 [n], sorted by the rank of ``worse`` and then of ``better``.
        is_dropped: whether ``better`` is dropped by an earlier call with better documents, bool [n].
    """
    dropped: set[int] = set()
    chosen = []
    columns = zip(worse.tolist(), better.tolist(), is_dropped.tolist(), strict=True)
    for place, (document, other, is_gone) in enumerate(columns):
        if not is_gone and document not in dropped and other not in dropped:
            dropped.add(document)
            chosen.append(place)
    return np.array(chosen, np.int64)


def weights_of(copies: np.ndarray, most: float) -> np.ndarray:
    """Return the weight of each document, float64 [n]: 1 + ln(copies), rounded to quarters, at most ``most``.

    Repetition in independent sources is a sign of quality; the logarithm limits its effect. The rule is ours, because
    the rule of BaichuanSEED (arXiv 2408.15079) is not public. ``copies``: number of documents that each document
    represents, including itself, [n].
    """
    quarters: npt.NDArray[np.float64] = np.round(4 * (1 + np.log(np.maximum(copies, 1)))) / 4
    weights: npt.NDArray[np.float64] = np.minimum(quarters, most)
    return weights
