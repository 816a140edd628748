"""Partitions of a large corpus by k-means on a sample, so that windows are made in one partition at a time."""

from __future__ import annotations

from typing import Final

import numpy as np

from bytescale_ext.plan.sculpt.clusters import mean_directions, nearest_exact
from bytescale_ext.plan.sculpt.pieces import Ints, Vectors

_BRANCHES: Final = 32  # largest number of parts of one split
_ROUNDS: Final = 8


def partition_centres(sample: Vectors, largest: int, seed: int) -> Vectors:
    """Return centres to which vectors are assigned: [centres, d].

    Parts of the sample that are larger than ``largest`` are split by k-means, until they cannot be split.

    Args:
        sample: unit vectors or zeros, [n, d].
        largest: largest number of vectors of the sample that a centre should have.
        seed: seed of the first centres of each split.
    """
    random = np.random.RandomState(seed % 2**32)
    centres: list[Vectors] = []
    parts: list[Ints] = [np.arange(len(sample))]
    while parts:
        members = parts.pop(0)
        label = _split(sample[members], -(-len(members) // largest), random)
        groups = [members[label == number] for number in np.unique(label)]
        if len(groups) > 1:
            parts += groups
        else:
            centres.append(mean_directions(sample[members], np.zeros(len(members), np.int64), 1)[0])
    return np.stack(centres)


def _split(vectors: Vectors, parts: int, random: np.random.RandomState) -> Ints:
    """Return the part of each vector, [n]: by k-means with at most ``_BRANCHES`` parts."""
    first = random.permutation(len(vectors))[: min(parts, _BRANCHES)]
    centres = vectors[np.sort(first)]
    label = np.zeros(len(vectors), np.int64)
    for _ in range(_ROUNDS if len(centres) > 1 else 0):
        label, _similarity = nearest_exact(centres, vectors)
        centres = mean_directions(vectors, label, len(centres))
    return label
