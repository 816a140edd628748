"""Weights of sources, and Megatron's weights of samples."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bytescale_ext.data.mix.weights import MixturePart, ShareFactors, SourceQuality, blend, epochs, weigh

BOOKS = MixturePart("p/books", "books", 9_000, 30)
CHATS = MixturePart("p/chats", "chats", 1_000, 100)


def shares(
    parts: list[MixturePart], known: dict[str, SourceQuality] | None = None, factors: ShareFactors | None = None
) -> list[float]:
    return [one.share for one in weigh(parts, known or {}, factors or ShareFactors())]


def test_duplicates_and_refused_documents_count_against_a_source() -> None:
    known = {"books": SourceQuality(duplication=0.5, quality=0.4)}
    assert shares([BOOKS, CHATS], known) == pytest.approx([1800 / 2800, 1000 / 2800])
    assert shares([BOOKS, CHATS], known, ShareFactors(duplication=0, quality=0)) == pytest.approx([0.9, 0.1])
    (books, chats) = weigh([BOOKS, CHATS], known, ShareFactors(quality=2))
    assert (books.duplication, books.quality) == pytest.approx((0.5, 0.16))
    assert (chats.duplication, chats.quality) == (1.0, 1.0)


def test_documents_that_weigh_more_count_more_often() -> None:
    heavy = MixturePart("p/books-x3.00", "books", 1_000, 10, 3.0)
    (books, chats) = weigh([BOOKS, heavy, CHATS], {}, ShareFactors())
    assert (books.source, books.tokens) == ("books", 12_000)
    assert chats.share == pytest.approx(1 / 13)
    seen = epochs([BOOKS, heavy, CHATS], [books, chats], 13_000)
    assert seen == pytest.approx({"p/books": 1.0, "p/books-x3.00": 3.0, "p/chats": 1.0})


def test_a_source_without_value_gets_nothing_and_none_with_any_is_an_error() -> None:
    assert shares([BOOKS, CHATS], {"chats": SourceQuality(quality=0)}) == [1.0, 0.0]
    with pytest.raises(ValueError, match="no source has any weight"):
        shares([BOOKS, CHATS], {"books": SourceQuality(duplication=1), "chats": SourceQuality(quality=0)})


parts = st.lists(
    st.builds(
        MixturePart,
        st.integers().map(str),
        st.sampled_from("abc"),
        st.integers(100, 10**6),
        st.integers(1, 1000),
        st.sampled_from([1.0, 1.75, 3.0]),
    ),
    min_size=1,
    max_size=6,
    unique_by=lambda part: part.prefix,
)


@given(parts, st.floats(0.5, 5))
def test_the_tokens_of_a_training_have_the_given_shares(some: list[MixturePart], temperature: float) -> None:
    """Count the tokens of a training that draws samples by Megatron's weights."""
    weighed = weigh(some, {}, ShareFactors(temperature))
    drawn = blend(some, weighed)
    assert sum(weight for weight, _ in drawn) == pytest.approx(1)
    assert [prefix for _, prefix in drawn] == [part.prefix for part in some]
    tokens = {part.prefix: weight * part.tokens / part.samples for (weight, _), part in zip(drawn, some, strict=True)}
    total = sum(tokens.values())
    for one in weighed:
        own = sum(tokens[part.prefix] for part in some if part.source == one.source)
        assert own / total == pytest.approx(one.share)


@given(parts, st.integers(1, 10**9))
def test_epochs_add_up_to_the_budget(some: list[MixturePart], budget: int) -> None:
    seen = epochs(some, weigh(some, {}, ShareFactors()), budget)
    assert sum(seen[part.prefix] * part.tokens for part in some) == pytest.approx(budget)
    for one, other in itertools.pairwise(some):
        if one.source == other.source:
            assert seen[one.prefix] / seen[other.prefix] == pytest.approx(one.weight / other.weight)


def test_more_samples_of_the_same_tokens_get_more_weight() -> None:
    cut = dataclasses.replace(BOOKS, samples=300)
    before, after = (
        {p: w for w, p in blend([one, CHATS], weigh([one, CHATS], {}, ShareFactors()))} for one in (BOOKS, cut)
    )
    assert before["p/books"] == pytest.approx(30 / 130)
    assert after["p/books"] == pytest.approx(300 / 400)
    assert np.isclose(sum(after.values()), 1)
