"""Figures of windows, against sums over all pairs."""

from __future__ import annotations

import numpy as np
import pytest

from bytescale_ext.plan.sculpt.pieces import ROW, Pieces, pieces_of_rows, table_of, window_bounds
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


def test_figures_by_hand() -> None:
    vectors = unit(np.array([[1.0, 0], [1, 0], [0, 1], [1, 0]]))
    pieces = Pieces(np.array([0, 2, 2, 3]), np.array([0, 0, 10, 0]), np.array([6, 10, 4, 8]), vectors)
    rows = [(0, 0, 0, 6), (0, 3, 0, 4), (1, 2, 0, 10), (2, 2, 10, 4), (2, 3, 4, 2)]
    table = np.array(rows, dtype=ROW)
    assert pieces_of_rows(table, pieces, 10).tolist() == [0, 3, 1, 2, 3]
    assert window_bounds(table).tolist() == [0, 2, 3, 5]
    quality = quality_of(table, pieces, 10)
    assert quality.num_windows == 3
    assert quality.fill == pytest.approx(26 / 30)
    assert quality.relevance == pytest.approx((1 + 0) / 2)
    assert quality.random_relevance == pytest.approx(3 / 6)
    assert quality.cut == pytest.approx(1 / 4)
    assert quality.documents_per_window == pytest.approx(5 / 3)
    assert quality.tokens_kept == pytest.approx(26 / 28)


def test_a_document_in_two_rows_of_a_window_counts_once() -> None:
    pieces = pieces_of([15], [0], context=10)
    everything = np.arange(2)
    table = table_of(
        pieces, np.zeros(2, dtype=np.int64), everything[::-1], np.zeros(2, dtype=np.int64), np.array([5, 5])
    )
    assert table["start"].tolist() == [0, 10]
    assert quality_of(table, pieces, 10).documents_per_window == 1


def test_no_window() -> None:
    assert window_bounds(np.empty(0, dtype=ROW)).tolist() == [0]
