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

from bytescale_ext.data.clean.words import RULES, LinedText, jaccard, shingles, word_hashes
from tests.sample import sampled


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


@pytest.mark.full
@pytest.mark.ranks
def test_hashes_are_equal_in_every_process() -> None:
    command = "from bytescale_ext.data.clean.words import word_hashes; print(word_hashes('naïve')[0])"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, timeout=120)
    assert int(done.stdout) == word_hashes("naïve")[0]


SPACED = st.characters(blacklist_categories=("Mn", "Mc", "Me", "Cf", "Lo", "Nl"))


@pytest.mark.slow
@given(st.text(SPACED, max_size=40))
def test_words_are_those_of_the_pattern(text: str) -> None:
    found = re.findall(r"\w+", text)
    hashes = word_hashes(text).tolist()
    assert len(hashes) == len(found)
    assert len(set(hashes)) == len(set(found))
    assert [int(word_hashes(word)[0]) for word in found] == hashes


WORDS = {
    "请联系zhangwei。": ["请", "联", "系", "zhangwei", "。"],
    "東京はLinuxで": ["東", "京", "は", "Linux", "で"],
    "ที่นี่ดี": ["ที่", "นี่", "ดี"],
    "हिन्दी में लिखा": ["हिन्दी", "में", "लिखा"],
    "ភាសាខ្មែរ": ["ភា", "សា", "ខ្", "មែ", "រ"],
    "မြန်မာ": ["မြ", "န်", "မာ"],
    "བོད་ཡིག": ["བོ", "ད", "་", "ཡི", "ག"],
    "cafe\u0301 x": ["cafe\u0301", "x"],
    "한국어 문장": ["한국어", "문장"],
    "می\u200cروم": ["می\u200cروم"],
}


@pytest.mark.parametrize("text", WORDS)
def test_segments_suit_the_script(text: str) -> None:
    assert RULES.word_tokenize(text) == WORDS[text]
    is_word = [word for word in WORDS[text] if any(letter.isalnum() for letter in word)]
    assert len(word_hashes(text)) == len(is_word)


SENTENCES = {
    "一。二！三？「四。」五": ["一。", "二！", "三？", "「四。」", "五"],
    "पहला है। दूसरा॥तीसरा": ["पहला है।", "दूसरा॥", "तीसरा"],
    "أولا؟ ثانيا۔ ثالثا": ["أولا؟", "ثانيا۔", "ثالثا"],
    "ទីមួយ។ទីពីរ៕ទីបី": ["ទីមួយ។", "ទីពីរ៕", "ទីបី"],
    "တစ်။နှစ်။": ["တစ်။", "နှစ်။"],
    "ประโยคแรก ประโยคสอง abc": ["ประโยคแรก", "ประโยคสอง abc"],
    "3.5 is one. Two e.g. this": ["3.5 is one.", "Two e.g.", "this"],
    "Das ist (gut.) Ja\u2026 Nein": ["Das ist (gut.)", "Ja\u2026", "Nein"],
}


@pytest.mark.parametrize("text", SENTENCES)
def test_sentences_end_as_the_script_ends_them(text: str) -> None:
    assert RULES.sent_tokenize(text) == SENTENCES[text]


ALPHABETS = {
    "Latin": "abcdefghijklmnoprstuvwyz",
    "Cyrillic": "абвгдежзиклмнопрстуфхчшя",
    "Greek": "αβγδεζηθικλμνξοπρστυφχω",
    "Arabic": "ابتثجحخدرزسشصطعفقكلمنهوي",
    "Devanagari": "कखगघचजटडतदनपबमयरलवसहाीेो",
    "Hangul": "가나다라마바사아자차카타파하고노도로모보소오조",
    "Han": "的一是在不了有和人这中大为上个国我以要他时来用们生到作地于出就分对成会可主发年动同工也能下过子说产种面而方",
    "Kana": "あいうえおかきくけこさしすせそたちつてとなにぬねのはひふへほまみむめも",
    "Thai": "กขคงจชดตถทนบปผพมยรลวสหอะาเแโไ",
}


@pytest.mark.parametrize("script", sampled(ALPHABETS, ["Latin", "Arabic", "Thai"]))
def test_texts_with_few_changed_letters_are_similar(script: str) -> None:
    """One letter in 333 differs, as a correction leaves it."""
    generator = np.random.RandomState(0)
    letters, is_spaced = list(ALPHABETS[script]), script not in ("Han", "Kana", "Thai")
    similar = 0
    for _ in range(20):
        lengths = generator.randint(2, 8, 400) if is_spaced else [1000]
        text = (" " if is_spaced else "").join("".join(generator.choice(letters, length)) for length in lengths)
        other = list(text)
        for place in generator.choice([at for at, letter in enumerate(text) if letter != " "], len(text) // 333, False):
            other[place] = letters[letters.index(other[place]) - 1]
        sets = [shingles(each, 5) for each in (text, "".join(other))]
        similar += jaccard(*sets) >= 0.8
    assert similar == 20


def test_composition_and_case_change_nothing() -> None:
    assert np.array_equal(
        shingles("Café Ångström über alle", 2), shingles("CAFE\u0301 A\u030angstro\u0308m u\u0308ber alle", 2)
    )


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


def test_lines_of_datatroves_steps_end_at_newlines_alone() -> None:
    text = LinedText("one\u2028two\x0cthree\r\nfour\n")
    assert text.splitlines() == ["one\u2028two\x0cthree", "four"]
    assert text.splitlines(keepends=True) == ["one\u2028two\x0cthree\r\n", "four\n"]
    assert text == "one\u2028two\x0cthree\r\nfour\n"
