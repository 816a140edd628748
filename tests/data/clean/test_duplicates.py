"""Choice of kept documents against the definition, for random graphs in random orders."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from bytescale_ext.data.clean.duplicates import (
    candidate_pairs,
    choose_kept,
)
from bytescale_ext.data.clean.shelf import ROW


def rows_of(texts: list[str], names: list[int] | None = None) -> np.ndarray:
    rows = np.zeros(len(texts), ROW)
    for number, text in enumerate(texts):
        rows[number] = (
            sum(map(ord, text)) * 7919 % 97,
            len(text) * 31,
            len(text),
            0,
            number if names is None else names[number],
        )
    return rows


def test_in_a_large_bucket_the_first_are_compared_with_all() -> None:
    count = 100
    first, places = np.arange(count), np.arange(count)[::-1].copy()
    pairs = {tuple(pair) for pair in candidate_pairs([np.arange(count)], first, places).tolist()}
    ahead = set(range(count - 64, count))
    assert pairs == {pair for pair in combinations(range(count), 2) if ahead & set(pair)}


def case(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return groups of equal texts, the order and verified pairs of 40 documents."""
    random = np.random.RandomState(seed)
    first = np.arange(40)
    for number in random.choice(40, 10, replace=False):
        other = random.randint(40)
        if first[other] == other and not (first == number)[np.arange(40) != number].any():
            first[number] = other
    first = first[first]
    own = np.unique(first)
    pairs = {tuple(sorted(random.choice(own, 2, replace=False).tolist())) for _ in range(random.randint(1, 60))}
    return first, random.permutation(40), np.array(sorted(pairs), np.int64)


@pytest.mark.parametrize("seed", range(20))
def test_what_stays_has_no_duplicates_and_stands_for_all(seed: int) -> None:
    first, places, pairs = case(seed)
    kept = choose_kept(first, places, pairs)
    stays = {number for number in range(40) if kept.kept_by[number] == number}
    linked = {frozenset(pair) for pair in pairs.tolist()}
    assert not any({one, other} in linked for one, other in combinations(sorted(stays), 2))
    for number in range(40):
        by = int(kept.kept_by[number])
        own = int(first[number])
        assert by in stays
        if own in stays:
            assert by == own
        else:
            assert frozenset((by, own)) in linked
            assert places[by] < places[own]
    assert kept.copies.sum() == 40
    assert (kept.copies > 0).tolist() == [number in stays for number in range(40)]


@pytest.mark.parametrize("seed", range(5))
def test_the_order_of_documents_changes_nothing(seed: int) -> None:
    first, places, pairs = case(seed)
    kept = choose_kept(first, places, pairs).kept_by
    moved = np.random.RandomState(seed).permutation(40)  # document i now has the number moved[i]
    back = np.argsort(moved)
    again = choose_kept(moved[first[back]], places[back], np.sort(moved[pairs], axis=1))
    assert again.kept_by[moved].tolist() == moved[kept].tolist()


def test_a_chain_of_duplicates_does_not_drop_what_resembles_nothing_kept() -> None:
    # 0 resembles 1 and 1 resembles 2, but 0 does not resemble 2: 1 goes, 2 stays.
    kept = choose_kept(np.arange(3), np.arange(3), np.array([[0, 1], [1, 2]]))
    assert kept.kept_by.tolist() == [0, 0, 2]
    assert kept.copies.tolist() == [2, 0, 1]
