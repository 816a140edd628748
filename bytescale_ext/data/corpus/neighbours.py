"""The nearest centre of many vectors: exact for few centres, a graph of faiss for many."""

from __future__ import annotations

from typing import Final

import numpy as np

from bytescale_ext.plan.sculpt.clusters import nearest_exact

EXACT: Final = 4096  # centres up to which all products are computed
_LINKS, _SEARCHED = 32, 64


def nearest_centres(centres: np.ndarray, vectors: np.ndarray, exact: int = EXACT) -> tuple[np.ndarray, np.ndarray]:
    """Return the nearest centre of each vector, and their inner product.

    With more than ``exact`` centres it searches a navigable graph (HNSW), which misses a few nearest ones.

    Args:
        centres: float32 [c, d].
        vectors: float32 [n, d].
        exact: the most centres that are searched one by one.

    Returns:
        Numbers of centres int64 [n]; inner products float32 [n].
    """
    if len(centres) <= exact:
        return nearest_exact(centres, vectors)
    import faiss

    index = faiss.IndexHNSWFlat(centres.shape[1], _LINKS, faiss.METRIC_INNER_PRODUCT)
    index.hnsw.efSearch = _SEARCHED
    num_threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)  # several threads would build another graph each time
    index.add(centres)
    faiss.omp_set_num_threads(num_threads)
    alike, label = index.search(vectors, 1)
    return label[:, 0], alike[:, 0]
