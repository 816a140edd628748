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

from bytescale_ext.data.clean import words as module
from bytescale_ext.data.clean.words import RULES, jaccard, shingles, word_hashes


def test_words_and_marks() -> None:
    assert RULES.word_tokenize("It's 3.5 metres, naïve!") == [
        "It", "'", "s", "3", ".", "5", "metres", ",", "naïve", "!",
    ]  # fmt: skip


def test_sentences_end_with_marks_and_lines() -> None:
    text = 'One. Two has "quotes." Three\n\n   \nfour, v1.2 too?\nend'
    assert RULES.sent_tokenize(text) == ["One.", 'Two has "quotes."', "Three", "four, v1.2 too?", "end"]
    assert RULES.sent_tokenize("   \n ") == []


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


def test_the_order_of_words_matters_and_case_does_not() -> None:
    assert shingles("a b c d e", 5).tolist() == shingles("A, b C; d e!", 5).tolist()
    assert shingles("a b c d e", 5).tolist() != shingles("b a c d e", 5).tolist()


def test_short_and_empty_texts() -> None:
    assert len(shingles("two words", 5)) == 1
    assert len(shingles("... !", 5)) == 0


def test_similarity_is_that_of_sets() -> None:
    one, other = "a b c d e f g h", "a b c d e f g x"
    sets = reference(one, 3), reference(other, 3)
    expected = len(sets[0] & sets[1]) / len(sets[0] | sets[1])
    assert jaccard(shingles(one, 3), shingles(other, 3)) == pytest.approx(expected)
    assert jaccard(shingles(one, 3), shingles("", 3)) == 0


@pytest.mark.ranks
def test_hashes_are_equal_in_every_process() -> None:
    command = "from bytescale_ext.data.clean.words import word_hashes; print(word_hashes('naïve')[0])"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, timeout=120)
    assert int(done.stdout) == word_hashes("naïve")[0]


def test_a_long_text_is_hashed_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    text = ", ".join(f"word{number} naïve" for number in range(50)) + "."
    expected = word_hashes(text).tolist()
    assert len(set(expected)) == 51
    for block in (1, 7, 100):
        monkeypatch.setattr(module, "_BLOCK", block)
        assert word_hashes(text).tolist() == expected


def test_a_word_has_its_hash_beside_any_other() -> None:
    alone = [int(word_hashes(word)[0]) for word in ("data", "x" * 5000, "_a1")]
    assert word_hashes(f"data, {'x' * 5000}! _a1").tolist() == alone
    assert word_hashes(f"data \u4e16 {'x' * 5000} \ud800 _a1").tolist()[::2][:2] == alone[:2]  # not ASCII: 4 bytes each


def test_letters_of_a_word_have_their_places() -> None:
    assert len(set(word_hashes("ab ba aab aba baa abab a b").tolist())) == 8
    assert len(word_hashes("")) == len(word_hashes(" -- ")) == 0


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
    # A text of one word is one run, which no run of two words equals.
    assert found == pytest.approx(len(sets[0] & sets[1]) / len(sets[0] | sets[1]))
    assert found == jaccard(*(shingles(text, 2) for text in reversed(texts)))
