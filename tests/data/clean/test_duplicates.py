"""Choice of kept documents against the definition, for random graphs in random orders."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from bytescale_ext.data.clean.duplicates import candidate_pairs, dropping_pairs
from bytescale_ext.data.clean.equal import equal_texts
from bytescale_ext.data.clean.shelf import BY_TEXT
from tests.sample import seeds

COUNT = 40


def test_in_a_large_bucket_the_first_are_compared_with_all() -> None:
    members = np.arange(100)[::-1].copy()
    pairs = {tuple(pair) for pair in candidate_pairs(members).tolist()}
    ahead = set(range(100 - 64, 100))
    assert pairs == {pair for pair in combinations(range(100), 2) if ahead & set(pair)}


def case(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the rank of each document and random pairs of documents."""
    random = np.random.RandomState(seed)
    count = random.randint(1, 60)
    pairs = {tuple(sorted(random.choice(COUNT, 2, replace=False).tolist())) for _ in range(count)}
    return random.permutation(COUNT), np.array(sorted(pairs), np.int64)


def kept_by(rank_of: np.ndarray, pairs: np.ndarray, blocks: int = 1) -> np.ndarray:
    """Return the document that stays for each document; ``blocks``: calls among which the documents are divided."""
    by_rank = np.take_along_axis(pairs, np.argsort(rank_of[pairs], axis=1), axis=1)  # better, worse
    by_rank = by_rank[np.lexsort((rank_of[by_rank[:, 0]], rank_of[by_rank[:, 1]]))]
    kept, is_dropped = np.arange(COUNT), np.zeros(COUNT, bool)
    for ranks in np.array_split(np.arange(COUNT), blocks):
        better, worse = by_rank[np.isin(rank_of[by_rank[:, 1]], ranks)].T
        chosen = dropping_pairs(worse, better, is_dropped[better])
        is_dropped[worse[chosen]] = True
        kept[worse[chosen]] = better[chosen]
    return kept


@pytest.mark.parametrize("seed", seeds(20))
def test_what_stays_has_no_duplicates_and_stands_for_all(seed: int) -> None:
    rank_of, pairs = case(seed)
    kept = kept_by(rank_of, pairs)
    stays = {number for number in range(COUNT) if kept[number] == number}
    linked = {frozenset(pair) for pair in pairs.tolist()}
    assert not any({one, other} in linked for one, other in combinations(sorted(stays), 2))
    for number in set(range(COUNT)) - stays:
        assert kept[number] in stays
        assert frozenset((int(kept[number]), number)) in linked
        assert rank_of[kept[number]] < rank_of[number]
    assert kept_by(rank_of, pairs, blocks=5).tolist() == kept.tolist()


@pytest.mark.parametrize("seed", range(5))
def test_the_order_of_documents_changes_nothing(seed: int) -> None:
    rank_of, pairs = case(seed)
    moved = np.random.RandomState(seed).permutation(COUNT)  # document i now has the number moved[i]
    again = kept_by(rank_of[np.argsort(moved)], np.sort(moved[pairs], axis=1))
    assert again[moved].tolist() == moved[kept_by(rank_of, pairs)].tolist()


def test_a_chain_of_duplicates_does_not_drop_what_resembles_nothing_kept() -> None:
    # 0 resembles 1 and 1 resembles 2, but 0 does not resemble 2: 1 goes, 2 stays.
    assert kept_by(np.arange(COUNT), np.array([[0, 1], [1, 2]]))[:3].tolist() == [0, 0, 2]


def test_of_equal_texts_the_smallest_name_stays() -> None:
    rows = np.array([(5, 1, 9, 0), (5, 1, 3, 1), (5, 2, 1, 2), (4, 1, 7, 3), (5, 1, 8, 4)], BY_TEXT)
    dropped, copies = equal_texts(rows)
    assert dropped.tolist() == [(0, 1), (4, 1)]
    assert copies.tolist() == [(1, 3)]
    assert [len(found) for found in equal_texts(rows[:0])] == [0, 0]
