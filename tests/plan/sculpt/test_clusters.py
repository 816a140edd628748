"""Clusters match the topics of documents, equal seeds give equal clusters, and every cluster fills a window."""

from __future__ import annotations

import numpy as np
import pytest

from bytescale_ext.plan.sculpt.clusters import ClusterSettings, find_clusters, leaders, nearest_exact
from tests.plan.sculpt.topics import CONTEXT, corpus, unit

SETTINGS = ClusterSettings()


def test_documents_of_one_cluster_are_about_one_topic() -> None:
    pieces, _, topics = corpus()
    label = find_clusters(pieces.vectors, pieces.length, CONTEXT, SETTINGS, 1)
    of_piece = topics[pieces.document]
    most = [int(np.bincount(of_piece[label == one]).max()) for one in range(int(label.max()) + 1)]
    assert sum(most) / len(label) > 0.95


def test_clusters_are_numbered_without_a_gap_and_can_fill_a_window() -> None:
    pieces, *_ = corpus()
    label = find_clusters(pieces.vectors, pieces.length, CONTEXT, SETTINGS, 1)
    tokens = np.bincount(label, weights=pieces.length)
    assert len(tokens) > 5
    assert tokens.min() > 0
    assert np.mean(tokens >= CONTEXT) > 0.8


def test_equal_seeds_give_equal_clusters() -> None:
    pieces, *_ = corpus()
    once, again, other = (find_clusters(pieces.vectors, pieces.length, CONTEXT, SETTINGS, seed) for seed in (1, 1, 2))
    assert np.array_equal(once, again)
    assert not np.array_equal(once, other)


@pytest.mark.parametrize("seed", [-1, 2**40])
def test_any_integer_is_a_seed(seed: int) -> None:
    pieces, *_ = corpus(20)
    assert len(find_clusters(pieces.vectors, pieces.length, CONTEXT, SETTINGS, seed)) == len(pieces)


def test_one_document_is_one_cluster() -> None:
    assert find_clusters(unit(np.ones((1, 4))), np.array([3]), CONTEXT, SETTINGS, 1).tolist() == [0]


def test_documents_too_few_for_a_window_are_one_cluster() -> None:
    vectors = unit(np.random.RandomState(0).standard_normal((7, 5)))
    assert set(find_clusters(vectors, np.full(7, 2), CONTEXT, SETTINGS, 1).tolist()) == {0}


def test_the_search_for_centres_can_be_another() -> None:
    calls = []

    def nearest(centres: np.ndarray, vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        calls.append(len(centres))
        return nearest_exact(centres, vectors)

    pieces, *_ = corpus(50)
    mine = find_clusters(pieces.vectors, pieces.length, CONTEXT, SETTINGS, 1, nearest)
    assert calls
    assert np.array_equal(mine, find_clusters(pieces.vectors, pieces.length, CONTEXT, SETTINGS, 1))


def test_nearest_centres_over_several_blocks() -> None:
    random = np.random.RandomState(0)
    centres, vectors = unit(random.standard_normal((9, 3))), unit(random.standard_normal((9000, 3)))
    label, alike = nearest_exact(centres, vectors)
    products = vectors @ centres.T
    assert np.array_equal(label, products.argmax(axis=1))
    assert np.allclose(alike, products.max(axis=1))


def test_leaders_are_apart_and_near_everything() -> None:
    vectors = unit(np.random.RandomState(0).standard_normal((200, 4)))
    chosen = vectors[leaders(vectors, 0.7)]
    among = chosen @ chosen.T - 2 * np.eye(len(chosen))
    assert among.max() < 0.7
    assert (vectors @ chosen.T).max(axis=1).min() >= 0.7 - 1e-6
    assert leaders(np.zeros((0, 4), dtype=np.float32), 0.5).tolist() == []
