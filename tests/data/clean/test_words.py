"""Words, sentences and shingles."""

from __future__ import annotations

import re
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bytescale_ext.data.clean.words import RULES, jaccard, shingles, word_hashes


@pytest.mark.parametrize("text", ["One. Two.\nThree", "", "a\n\nb. c", " lead. \n tail "])
def test_spans_and_sentences_are_numbered_alike(text: str) -> None:
    spans = RULES.span_tokenize(text)
    assert [text[begin:end].strip() for begin, end in spans] == RULES.sent_tokenize(text)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))


def reference(text: str, size: int) -> set[tuple[str, ...]]:
    words = "".join(one if one.isalnum() or one == "_" else " " for one in text.lower()).split()
    return {tuple(words[place : place + size]) for place in range(max(len(words) - size + 1, 1))} if words else set()


@pytest.mark.parametrize("size", [1, 3, 5])
def test_shingles_are_as_many_as_distinct_runs(size: int) -> None:
    text = "the cat sat on the mat, and the cat sat on the mat again. THE cat!"
    found = shingles(text, size)
    assert len(found) == len(reference(text, size))
    assert np.array_equal(found, np.unique(found))


@pytest.mark.ranks
def test_hashes_are_equal_in_every_process() -> None:
    command = "from bytescale_ext.data.clean.words import word_hashes; print(word_hashes('naïve')[0])"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, timeout=120)
    assert int(done.stdout) == word_hashes("naïve")[0]


@given(st.text(max_size=40))
def test_words_are_those_of_the_pattern(text: str) -> None:
    found = re.findall(r"\w+", text)
    hashes = word_hashes(text).tolist()
    assert len(hashes) == len(found)
    assert len(set(hashes)) == len(set(found))
    assert [int(word_hashes(word)[0]) for word in found] == hashes


@given(st.text(alphabet="ab .!?\"'\n\t\u2026\u3002", max_size=60))
def test_sentences_hold_every_word_once(text: str) -> None:
    spans = RULES.span_tokenize(text)
    assert "".join("".join(text[begin:end].split()) for begin, end in spans) == "".join(text.split())
    assert len(spans) == len(RULES.sent_tokenize(text))


@given(st.lists(st.sampled_from("abcd"), max_size=30), st.integers(1, 6))
def test_as_many_shingles_as_runs_of_any_text(letters: list[str], size: int) -> None:
    text = " ".join(letters)
    assert len(shingles(text, size)) == len(reference(text, size))


@given(
    st.lists(st.sampled_from("abcd"), min_size=1, max_size=20),
    st.lists(st.sampled_from("abcd"), min_size=1, max_size=20),
)
def test_similarity_of_any_two_texts(one: list[str], other: list[str]) -> None:
    texts = " ".join(one), " ".join(other)
    sets = [reference(text, 2) for text in texts]
    found = jaccard(*(shingles(text, 2) for text in texts))
    # A text of one word is a single run, which differs from every run of two words.
    assert found == pytest.approx(len(sets[0] & sets[1]) / len(sets[0] | sets[1]))
    assert found == jaccard(*(shingles(text, 2) for text in reversed(texts)))
