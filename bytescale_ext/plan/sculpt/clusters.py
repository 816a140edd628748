"""Clusters of documents by the variant of ISODATA that DataSculpt describes (arXiv 2409.00997, section 3).

Centres begin as random documents. In each round every document joins its nearest centre; documents that are far from
all centres found clusters of their own, centres that are close to each other merge, and clusters too small to fill a
window dissolve. "Far" and "close" are percentiles of the similarities of the round, because a fixed threshold, as
published, fits one embedding model only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from bytescale_ext.plan.sculpt.pieces import Ints, Vectors

Nearest = Callable[[Vectors, Vectors], tuple[Ints, Vectors]]
"""(centres [c, d], vectors [n, d]) -> (nearest centre of each vector [n], their inner product [n])."""

_BLOCK: Final = 4096  # vectors compared with all centres at a time


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """How clusters are found.

    Attributes:
        windows: windows that the first clusters hold on average; few make clusters pure, many leave little over.
        percentile: a document below this percentile of similarity to its centre founds a cluster, and centres merge
            that are more alike than documents and centres are at its counterpart, 100 - percentile.
        rounds: the most rounds.
        epsilon: rounds end once centres move less than this, as 1 - cosine, on average.
    """

    windows: float = 2.0
    percentile: float = 5.0
    rounds: int = 5
    epsilon: float = 0.01


def nearest_exact(centres: Vectors, vectors: Vectors) -> tuple[Ints, Vectors]:
    """Return the nearest centre of each vector, and their inner product.

    Args:
        centres: [c, d].
        vectors: [n, d].

    Returns:
        Numbers of centres [n]; inner products [n].
    """
    label, alike = np.empty(len(vectors), dtype=np.int64), np.empty(len(vectors), dtype=np.float32)
    for start in range(0, len(vectors), _BLOCK):
        block = slice(start, start + _BLOCK)
        products = vectors[block] @ centres.T
        label[block] = products.argmax(axis=1)
        alike[block] = products.max(axis=1)
    return label, alike


def find_clusters(
    vectors: Vectors,
    tokens: Ints,
    context: int,
    settings: ClusterSettings,
    seed: int,
    nearest: Nearest = nearest_exact,
) -> Ints:
    """Return the cluster of each vector [n]: numbers from 0, each of them used.

    Args:
        vectors: [n, d], unit length.
        tokens: [n] of each vector; clusters with fewer than ``context`` tokens dissolve.
        context: tokens of a window.
        settings: how clusters are found.
        seed: of the random first centres.
        nearest: finds nearest centres.
    """
    wanted = max(1, round(float(tokens.sum()) / (settings.windows * context)))
    chosen = np.random.RandomState(seed % 2**32).permutation(len(vectors))[:wanted]
    centres = vectors[np.sort(chosen)]
    for _ in range(settings.rounds):
        label, alike = nearest(centres, vectors)
        low, high = (float(value) for value in np.percentile(alike, (settings.percentile, 100 - settings.percentile)))
        far = vectors[alike < low]
        grown = np.concatenate([centres, far[leaders(far, low)]])
        label, _ = nearest(grown, vectors)
        means = _means(vectors, label, len(grown))
        moved = 1.0 - float(np.mean(np.sum(means[: len(centres)] * centres, axis=1)))
        large = np.bincount(label, weights=tokens, minlength=len(grown)) >= context
        centres = means[large] if large.any() else means[:1]
        centres = centres[leaders(centres, high)]
        if moved < settings.epsilon:
            break
    label, _ = nearest(centres, vectors)
    numbers: Ints = np.unique(label, return_inverse=True)[1].astype(np.int64)
    return numbers


def leaders(vectors: Vectors, threshold: float) -> Ints:
    """Return the vectors [leaders] of which none is as alike as ``threshold`` to one before it. ``vectors``: [n, d]."""
    chosen: list[int] = []
    kept = np.empty_like(vectors)
    for i, vector in enumerate(vectors):
        if not chosen or float((kept[: len(chosen)] @ vector).max()) < threshold:
            kept[len(chosen)] = vector
            chosen.append(i)
    return np.array(chosen, dtype=np.int64)


def _means(vectors: Vectors, label: Ints, num_clusters: int) -> Vectors:
    """Return the mean direction of each cluster [c, d]; zeros for an empty one."""
    order = np.argsort(label, kind="stable")
    present, first = np.unique(label[order], return_index=True)
    means = np.zeros((num_clusters, vectors.shape[1]), dtype=np.float32)
    means[present] = np.add.reduceat(vectors[order], first, axis=0)
    norms = np.linalg.norm(means, axis=1, keepdims=True)
    return np.divide(means, norms, out=means, where=norms > 0)
