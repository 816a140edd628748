"""Nearest centres by a graph are nearly always exact, and equal in each run."""

from __future__ import annotations

import numpy as np
import pytest

from bytescale_ext.data.corpus.embed import unit
from bytescale_ext.data.corpus.neighbours import nearest_centres
from bytescale_ext.plan.sculpt.clusters import nearest_exact


@pytest.mark.slow
def test_the_graph_finds_nearly_all() -> None:
    random = np.random.RandomState(0)
    centres, vectors = unit(random.standard_normal((600, 16))), unit(random.standard_normal((2000, 16)))
    exact, products = nearest_exact(centres, vectors)
    label, alike = nearest_centres(centres, vectors, exact=100)
    assert (label == exact).mean() > 0.97
    assert np.allclose(alike, np.sum(centres[label] * vectors, axis=1), atol=1e-5)
    assert np.all(alike <= products + 1e-5)
    again, _ = nearest_centres(centres, vectors, exact=100)
    assert np.array_equal(label, again)


def test_few_centres_are_compared_one_by_one() -> None:
    random = np.random.RandomState(0)
    centres, vectors = unit(random.standard_normal((20, 8))), unit(random.standard_normal((50, 8)))
    for mine, exact in zip(nearest_centres(centres, vectors), nearest_exact(centres, vectors), strict=True):
        assert np.array_equal(mine, exact)
