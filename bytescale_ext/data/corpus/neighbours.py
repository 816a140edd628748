"""Nearest centres of many vectors: exact for few centres, by an HNSW graph of faiss for many."""

from __future__ import annotations

from typing import Final

import numpy as np

from bytescale_ext.plan.sculpt.clusters import nearest_exact

EXACT: Final = 4096  # number of centres up to which the search is exact
_LINKS, _SEARCHED = 32, 64


def nearest_centres(centres: np.ndarray, vectors: np.ndarray, exact: int = EXACT) -> tuple[np.ndarray, np.ndarray]:
    """Return (nearest centre, int64 [n]; inner product with it, float32 [n]) of each vector.

    Args:
        centres: centres, float32 [c, d].
        vectors: vectors, float32 [n, d].
        exact: largest number of centres for an exact search. With more centres an HNSW graph is searched, which misses
            a few nearest centres.
    """
    if len(centres) <= exact:
        return nearest_exact(centres, vectors)
    import faiss

    index = faiss.IndexHNSWFlat(centres.shape[1], _LINKS, faiss.METRIC_INNER_PRODUCT)
    index.hnsw.efSearch = _SEARCHED
    num_threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)  # several threads would build a different graph each time
    index.add(centres)
    faiss.omp_set_num_threads(num_threads)
    products, centre = index.search(vectors, 1)
    return centre[:, 0], products[:, 0]
