"""Clusters of documents, by the variant of ISODATA in DataSculpt (arXiv 2409.00997, section 3).

The first centres are random documents. In each round every document joins its nearest centre. Documents that are far
from all centres start new clusters. Centres that are close to each other merge, and clusters that are too small to fill
a window dissolve. "Far" and "close" are percentiles of the similarities of the round, because the fixed thresholds of
the paper suit only one embedding model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from bytescale_ext.plan.sculpt.pieces import Ints, Vectors

Nearest = Callable[[Vectors, Vectors], tuple[Ints, Vectors]]
"""Function from (centres [c, d], vectors [n, d]) to (nearest centre of each vector [n], inner product with it [n])."""

_BLOCK: Final = 4096  # vectors that are compared with all centres together


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """Settings of the clustering.

    Attributes:
        windows: average number of windows that the documents of a first cluster fill. Small clusters are purer; large
            clusters leave fewer documents over.
        percentile: percentile of the similarities between documents and their centres. A document below it starts a
            new cluster. Centres merge if their similarity exceeds the percentile ``100 - percentile``.
        rounds: largest number of rounds.
        epsilon: average movement of the centres, as 1 - cosine, below which rounds end.
    """

    windows: float = 2.0
    percentile: float = 5.0
    rounds: int = 5
    epsilon: float = 0.01


def nearest_exact(centres: Vectors, vectors: Vectors) -> tuple[Ints, Vectors]:
    """Return (number of the nearest centre, int64 [n]; inner product with it, float32 [n]) of each vector.

    Args:
        centres: centres, [c, d].
        vectors: vectors, [n, d].
    """
    label, similarity = np.empty(len(vectors), dtype=np.int64), np.empty(len(vectors), dtype=np.float32)
    for start in range(0, len(vectors), _BLOCK):
        block = slice(start, start + _BLOCK)
        products = vectors[block] @ centres.T
        label[block] = products.argmax(axis=1)
        similarity[block] = products.max(axis=1)
    return label, similarity


def find_clusters(
    vectors: Vectors,
    tokens: Ints,
    context: int,
    settings: ClusterSettings,
    seed: int,
    nearest: Nearest = nearest_exact,
) -> Ints:
    """Return the cluster of each vector: [n]. Clusters are numbered from 0, and none is empty.

    Args:
        vectors: unit vectors, [n, d].
        tokens: tokens of each vector's piece, [n]. Clusters with fewer than ``context`` tokens dissolve.
        context: tokens of a window.
        settings: settings of the clustering.
        seed: seed of the random first centres.
        nearest: function that returns the nearest centres.
    """
    num_first = max(1, round(float(tokens.sum()) / (settings.windows * context)))
    chosen = np.random.RandomState(seed % 2**32).permutation(len(vectors))[:num_first]
    centres = vectors[np.sort(chosen)]
    percentiles = settings.percentile, 100 - settings.percentile
    for _ in range(settings.rounds):
        label, similarity = nearest(centres, vectors)
        low, high = (float(value) for value in np.percentile(similarity, percentiles))
        far = vectors[similarity < low]
        grown = np.concatenate([centres, far[leaders(far, low)]])
        label, _ = nearest(grown, vectors)
        means = mean_directions(vectors, label, len(grown))
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
    """Return the indices of leaders, [leaders]. ``vectors``: unit vectors, [n, d].

    A vector is a leader if its similarity to every earlier leader is below ``threshold``.
    """
    chosen: list[int] = []
    leading = np.empty_like(vectors)
    for i, vector in enumerate(vectors):
        if not chosen or float((leading[: len(chosen)] @ vector).max()) < threshold:
            leading[len(chosen)] = vector
            chosen.append(i)
    return np.array(chosen, dtype=np.int64)


def mean_directions(vectors: Vectors, label: Ints, num_clusters: int) -> Vectors:
    """Return the mean direction of each cluster, [c, d]; zeros for an empty cluster."""
    order = np.argsort(label, kind="stable")
    present, first = np.unique(label[order], return_index=True)
    means = np.zeros((num_clusters, vectors.shape[1]), dtype=np.float32)
    means[present] = np.add.reduceat(vectors[order], first, axis=0)
    norms = np.linalg.norm(means, axis=1, keepdims=True)
    return np.divide(means, norms, out=means, where=norms > 0)
