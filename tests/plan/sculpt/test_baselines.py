"""Simpler builders of windows: each token is used once, and typical properties of each builder."""

from __future__ import annotations

import numpy as np
import pytest

from bytescale_ext.plan.sculpt.baselines import concatenated, fitted, neighbour_path
from bytescale_ext.plan.sculpt.check import check_windows
from bytescale_ext.plan.sculpt.pieces import Pieces, window_bounds
from bytescale_ext.plan.sculpt.quality import quality_of
from tests.plan.sculpt.topics import CONTEXT, corpus, pieces_of, unit


def test_concatenation_fills_every_window_but_the_last() -> None:
    pieces, lengths, _ = corpus()
    table = concatenated(pieces, CONTEXT, 1)
    check_windows(table, lengths, CONTEXT, "split")
    tokens = np.add.reduceat(table["length"], window_bounds(table)[:-1])
    assert (tokens[:-1] == CONTEXT).all()
    assert len(tokens) == -(-int(lengths.sum()) // CONTEXT)
    assert quality_of(table, pieces, CONTEXT).cut > 0.2


def test_concatenation_by_hand() -> None:
    pieces = pieces_of([3, 4, 25], [0, 1, 2], context=10)
    seeds = {tuple(np.random.RandomState(seed).permutation(3).tolist()): seed for seed in range(50)}
    table = concatenated(pieces, 10, seeds[(0, 1, 2)])
    assert [tuple(row) for row in table.tolist()] == [
        (0, 0, 0, 3), (0, 1, 0, 4), (0, 2, 0, 3), (1, 2, 3, 7), (1, 2, 10, 3), (2, 2, 13, 7), (2, 2, 20, 3),
        (3, 2, 23, 2),
    ]  # fmt: skip


def test_best_fit_cuts_nothing_and_fills_well() -> None:
    pieces, lengths, _ = corpus()
    table = fitted(pieces, CONTEXT)
    check_windows(table, lengths, CONTEXT, "none")
    assert quality_of(table, pieces, CONTEXT).fill > 0.97


def test_a_path_visits_neighbours() -> None:
    vectors = unit(np.array([[1, 0], [0, 1], [1, 0.1], [0.1, 1]]))
    pieces = Pieces(np.arange(4), np.zeros(4, dtype=np.int64), np.full(4, 5), vectors)
    assert neighbour_path(pieces, 10)["document"].tolist() == [0, 2, 1, 3]


@pytest.mark.parametrize("lengths", [[1], [100, 100], [250, 0, 3]])
def test_each_token_is_in_one_window(lengths: list[int]) -> None:
    pieces = pieces_of(lengths, [0] * len(lengths))
    for table in (concatenated(pieces, CONTEXT, 1), neighbour_path(pieces, CONTEXT)):
        check_windows(table, np.array(lengths), CONTEXT, "split")


def test_a_path_is_the_most_related() -> None:
    pieces, lengths, _ = corpus()
    table = neighbour_path(pieces, CONTEXT)
    check_windows(table, lengths, CONTEXT, "split")
    path, concat = (quality_of(one, pieces, CONTEXT) for one in (table, concatenated(pieces, CONTEXT, 1)))
    assert path.relevance > 2 * concat.relevance
