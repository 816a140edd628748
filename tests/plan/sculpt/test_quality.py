"""Quality of windows, against sums over all pairs."""

from __future__ import annotations

import numpy as np
import pytest

from bytescale_ext.plan.sculpt.pieces import window_table
from bytescale_ext.plan.sculpt.quality import mean_cosine, quality_of
from tests.plan.sculpt.topics import pieces_of, unit


def test_the_mean_cosine_is_that_of_all_pairs() -> None:
    vectors = unit(np.random.RandomState(0).standard_normal((9, 4)))
    group = np.array([0, 0, 0, 0, 2, 3, 3, 5, 5])
    of_groups = []
    for one in (0, 3, 5):
        members = vectors[group == one]
        pairs = [float(members[i] @ members[j]) for i in range(len(members)) for j in range(i)]
        of_groups.append(sum(pairs) / len(pairs))
    assert mean_cosine(vectors, group) == pytest.approx(sum(of_groups) / 3)
    assert mean_cosine(vectors, np.arange(9)) == 0


def test_a_document_in_two_rows_of_a_window_counts_once() -> None:
    pieces = pieces_of([15], [0], context=10)
    everything = np.arange(2)
    table = window_table(
        pieces, np.zeros(2, dtype=np.int64), everything[::-1], np.zeros(2, dtype=np.int64), np.array([5, 5])
    )
    assert table["start"].tolist() == [0, 10]
    assert quality_of(table, pieces, 10).documents_per_window == 1
