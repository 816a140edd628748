"""Words, sentences and shingles of a text by simple rules, without a model or a download.

Some scripts write no spaces between words: Chinese, Japanese, Thai, Lao, Khmer, Burmese, Tibetan and others. In their
texts each letter with its marks is a segment, so a shingle is a run of letters there and a run of words elsewhere.
"""

from __future__ import annotations

import re
import sys
import unicodedata
from functools import cache
from io import StringIO
from typing import Final

import numpy as np
import numpy.typing as npt
from datatrove.utils.word_tokenizers import WordTokenizer

from bytescale_ext.json_input import lines_of_text

_LETTER: Final = re.compile(r"[\w\u200c\u200d]")  # the last two join letters
IDEOGRAPHIC: Final = (
    "\u3005-\u3007\u3021-\u3029\u3040-\u30ff\u3105-\u312f\u31a0-\u31bf\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\ua000-\ua4cf"
    "\uf900-\ufaff\uff66-\uff9f\U0001b000-\U0001b16f\U00020000-\U0003ffff"
)
"""Ranges of a regular expression: Han, kana, Bopomofo, Yi. A word has about two letters."""
SYLLABIC: Final = (
    "\u0e01-\u0eff\u0f40-\u0fbc\u1000-\u109f\u1780-\u17d3\u17d7\u17dc\u1950-\u19df\u1a20-\u1aad\u1b05-\u1b4c\ua984-\ua9c0"
    "\ua9e0-\ua9fe\uaa60-\uaadf"
)
"""Ranges of a regular expression: Thai, Lao, Tibetan, Burmese, Khmer and relatives. A word has about four letters."""
_UNSPACED: Final = re.compile(f"[{IDEOGRAPHIC}{SYLLABIC}]")
_SYLLABIC: Final = re.compile(f"[{SYLLABIC}]")
_IDEOGRAPHIC: Final = re.compile(f"[{IDEOGRAPHIC}]")
# Kinds of characters: in no word, in a word, a segment, a combining mark.
_NONE, _SPACED, _ALONE, _MARK = range(4)
# Punctuation that ends a sentence without a blank after it: CJK, danda, Arabic, Khmer, Burmese, Tibetan and others.
_ENDS: Final = (
    "\u3002\uff01\uff1f\uff0e\uff61\u203c\u2047-\u2049\u0964\u0965\u061f\u06d4\u061e\u0700-\u0702\u0589\u1362\u1367\u1368"
    "\u17d4\u17d5\u104b\u0f0d-\u0f12\u1803\u1809\ua4ff\ua9c8\ua9c9\u1aa8-\u1aab\uabeb\ufe52\ufe56\ufe57"
)
_CLOSERS: Final = "\"'\u2019\u201d\u00bb\u300d\u300f\u3009\u300b\u3011\u3015\uff09\uff3d\uff63)\\]"
# Thai and Lao end a sentence with a blank.
_BLANK: Final = r"(?<=[\u0e01-\u0eff])(?=[ \t\u00a0\u3000]+[\u0e01-\u0eff])"
_SENTENCE: Final = re.compile(
    rf"[^\n]+?(?:[.!?\u2026]+[{_CLOSERS}]*(?=\s)|[.!?\u2026{_ENDS}]*[{_ENDS}][{_CLOSERS}{_ENDS}]*|{_BLANK}|(?=\n)|$)"
)
_BLOCK: Final = 1 << 16  # words
_MIX: Final = np.uint64(0x9E3779B97F4A7C15)


class LinedText(str):
    """Text whose lines end at newlines alone, for steps of datatrove that call ``splitlines``."""

    __slots__ = ()

    def splitlines(self, keepends: bool = False) -> list[str]:
        """Return the lines, with their newlines if ``keepends``."""
        return StringIO(str(self), newline="\n").readlines() if keepends else lines_of_text(self)


class RuleTokenizer(WordTokenizer):  # type: ignore[misc]  # datatrove has no types
    """Tokenizer for datatrove's steps, instead of the tokenizers of spaCy or NLTK."""

    def __init__(self) -> None:
        super().__init__("rules")

    def word_tokenize(self, text: str) -> list[str]:
        """Return words, or segments in scripts without spaces, and single punctuation marks."""
        if text.isascii():
            return _ASCII_WORD.findall(text)
        kinds = kinds_of(codes_of(text))
        is_mark = (kinds == _NONE) & ~np.fromiter(map(str.isspace, text), bool, len(text))
        begins, ends = _segments(kinds)
        places = np.concatenate([begins, np.flatnonzero(is_mark)])
        stops = np.concatenate([ends, np.flatnonzero(is_mark) + 1])
        order = np.argsort(places, kind="stable")
        return [text[begin:end] for begin, end in zip(places[order].tolist(), stops[order].tolist(), strict=True)]

    def span_tokenize(self, text: str) -> list[tuple[int, int]]:
        """Return (begin, end) of each sentence that is not blank."""
        return [match.span() for match in _SENTENCE.finditer(text) if not match.group().isspace()]

    def sent_tokenize(self, text: str) -> list[str]:
        """Return the sentences, without surrounding white space."""
        return [text[begin:end].strip() for begin, end in self.span_tokenize(text)]


_ASCII_WORD: Final = re.compile(r"\w+|[^\w\s]")
RULES: Final = RuleTokenizer()


def composed(text: str) -> str:
    """Return a text with composed characters (NFC): texts that differ in their composition alone are equal."""
    return text if text.isascii() else unicodedata.normalize("NFC", text)


def normal(text: str) -> str:
    """Return a text for comparison: composed (NFC) and in lower case."""
    return composed(text).lower()


def letters_per_word(text: str) -> int:
    """Return the usual number of segments of a word in most of a text: 1 in scripts with spaces, else 2 or 4."""
    if text.isascii():
        return 1
    kinds = kinds_of(codes_of(text))
    if np.count_nonzero(kinds == _ALONE) * 2 < np.count_nonzero((kinds == _ALONE) | (kinds == _SPACED)):
        return 1
    return 4 if len(_SYLLABIC.findall(text)) > len(_IDEOGRAPHIC.findall(text)) else 2


def num_words(text: str) -> int:
    """Return about the number of words of a text, in any script."""
    count = len(_segments(kinds_of(codes_of(text)))[0])
    return -(-count // letters_per_word(text))


@cache
def _kinds(codes: int) -> np.ndarray:
    """Return the kind of each of the first ``codes`` code points: int8 [codes]."""
    characters = "".join(map(chr, range(codes)))
    kinds = np.zeros(codes, np.int8)
    kinds[[match.start() for match in _LETTER.finditer(characters)]] = _SPACED
    kinds[[match.start() for match in _UNSPACED.finditer(characters) if kinds[match.start()]]] = _ALONE
    kinds[[code for code in range(128, codes) if unicodedata.category(chr(code))[0] == "M"]] = _MARK
    return kinds


def codes_of(text: str) -> np.ndarray:
    """Return the code points of a text: uint8 [n] if it is ASCII, else uint32 [n]."""
    if text.isascii():
        return np.frombuffer(text.encode(), np.uint8)
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")


def kinds_of(codes: np.ndarray) -> np.ndarray:
    """Return the kinds of the characters with these code points, [n]: int8 [n].

    A mark without a letter before it is a letter.
    """
    is_plain = codes.dtype == np.uint8
    kinds: np.ndarray = _kinds(128 if is_plain else sys.maxunicode + 1)[codes]
    if not is_plain:
        first = np.append(True, kinds[:-1] == _NONE) & (kinds == _MARK)
        kinds[first] = _SPACED
    return kinds


def _segments(kinds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (begins, ends) of the words and segments of characters of these kinds, [n]: int64 [m] each."""
    inside = kinds != _NONE
    base = np.where(kinds == _MARK, 0, np.arange(len(kinds)))
    base = kinds[np.maximum.accumulate(base)] if len(kinds) else kinds  # kind of the letter that a mark belongs to
    before = np.append(np.int8(_NONE), base[:-1])
    starts = inside & (kinds != _MARK) & ((before == _NONE) | (kinds == _ALONE) | (before == _ALONE))
    stops = np.append(starts[1:] | ~inside[1:], True) & inside if len(kinds) else inside
    return np.flatnonzero(starts), np.flatnonzero(stops) + 1


@cache
def _factors(seed: int, count: int) -> np.ndarray:
    """Return random odd 64-bit numbers, uint64 [count]. A larger count only appends numbers."""
    return np.random.RandomState(seed).randint(0, 1 << 62, count, dtype=np.uint64) * np.uint64(2) + np.uint64(1)


def word_hashes(text: str) -> np.ndarray:
    """Return the hash of each word or segment of a text, uint64 [words]. Hashes are equal in all processes.

    The hash mixes the sum of the word's characters, each multiplied by a factor that depends on its position.
    """
    codes = codes_of(text)
    kinds = kinds_of(codes)
    inside = kinds != _NONE
    begins_of, ends_of = _segments(kinds)
    hashes = np.empty(len(begins_of), np.uint64)
    for first in range(0, len(hashes), _BLOCK):  # blocks limit the memory for long texts
        begins, ends = begins_of[first : first + _BLOCK], ends_of[first : first + _BLOCK]
        letters = codes[begins[0] : ends[-1]][inside[begins[0] : ends[-1]]]
        lengths = ends - begins
        starts = np.cumsum(lengths) - lengths
        position = np.arange(len(letters)) - np.repeat(starts, lengths)
        factors = _factors(0, 1 << int(lengths.max()).bit_length())
        hashes[first : first + _BLOCK] = np.add.reduceat((letters + np.uint64(1)) * factors[position], starts)
    hashes ^= hashes >> np.uint64(32)
    hashes *= _MIX
    hashes ^= hashes >> np.uint64(29)
    return hashes


def shingles(text: str, size: int) -> np.ndarray:
    """Return the hashes of the distinct shingles of a text: uint64 [n], sorted.

    A shingle is a run of ``size`` words or segments in lower case, without punctuation. A text with fewer words is a
    single shingle; a text without words has none.
    """
    hashes = word_hashes(normal(text))
    if not len(hashes):
        return hashes
    length = max(len(hashes) - size + 1, 1)
    total = np.zeros(length, np.uint64)
    for position, factor in enumerate(_factors(size, size)[: len(hashes)]):
        total += hashes[position : position + length] * factor  # the sum depends on the order; it wraps at 64 bits
    total.sort()
    is_new: npt.NDArray[np.bool_] = np.append(True, total[1:] != total[:-1])
    return total[is_new]


def jaccard(a: np.ndarray, b: np.ndarray) -> float:
    """Return the Jaccard similarity of two sets of shingles, uint64 [n] and [m], each sorted and distinct."""
    if not len(a) or not len(b):
        return 0.0
    common = len(np.intersect1d(a, b, assume_unique=True))
    return common / (len(a) + len(b) - common)
