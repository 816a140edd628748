"""Words, sentences and shingles of a text by plain rules, which need no model and no download."""

from __future__ import annotations

import re
import sys
from functools import cache
from typing import Final

import numpy as np
import numpy.typing as npt
from datatrove.utils.word_tokenizers import WordTokenizer

_WORD: Final = re.compile(r"\w+|[^\w\s]")
_LETTER: Final = re.compile(r"\w")
# A sentence ends with its line, or with punctuation before white space.
_SENTENCE: Final = re.compile(r"[^\n]+?(?:[.!?\u2026\u3002\uff01\uff1f][\"')\]]*(?=\s)|(?=\n)|$)")
_BLOCK: Final = 1 << 16  # words
_MIX: Final = np.uint64(0x9E3779B97F4A7C15)


class RuleTokenizer(WordTokenizer):  # type: ignore[misc]  # datatrove has no types
    """The tokenizer that datatrove's steps use here instead of spaCy's or NLTK's."""

    def __init__(self) -> None:
        super().__init__("rules")

    def word_tokenize(self, text: str) -> list[str]:
        """Return words and single punctuation marks."""
        return _WORD.findall(text)

    def span_tokenize(self, text: str) -> list[tuple[int, int]]:
        """Return the begin and end of each sentence that is not blank."""
        return [match.span() for match in _SENTENCE.finditer(text) if not match.group().isspace()]

    def sent_tokenize(self, text: str) -> list[str]:
        """Return the sentences, without white space around them."""
        return [text[begin:end].strip() for begin, end in self.span_tokenize(text)]


RULES: Final = RuleTokenizer()


@cache
def _is_letter(codes: int) -> np.ndarray:
    """Return whether each of the first ``codes`` code points is part of a word: bool [codes]."""
    every = "".join(map(chr, range(codes)))
    found = np.zeros(codes, bool)
    found[[match.start() for match in _LETTER.finditer(every)]] = True
    return found


@cache
def _factors(seed: int, count: int) -> np.ndarray:
    """Return odd numbers of 64 bits, uint64 [count]: fewer of them are the first ones of more."""
    return np.random.RandomState(seed).randint(0, 1 << 62, count, dtype=np.uint64) * np.uint64(2) + np.uint64(1)


def word_hashes(text: str) -> np.ndarray:
    """Return a hash of each word of a text, without punctuation: uint64 [words], the same in every process.

    The sum of the word's characters, each times a number that depends on its place in the word, mixed.
    """
    plain = text.isascii()
    wide = "utf-32-le", "surrogatepass"
    codes = np.frombuffer(text.encode(), np.uint8) if plain else np.frombuffer(text.encode(*wide), "<u4")
    inside = _is_letter(128 if plain else sys.maxunicode + 1)[codes]
    edges = np.flatnonzero(np.diff(inside, prepend=False, append=False))
    found = np.empty(len(edges) // 2, np.uint64)
    for first in range(0, len(found), _BLOCK):  # a long text takes little more memory than a short one
        begins, ends = edges[2 * first : 2 * (first + _BLOCK)].reshape(-1, 2).T
        letters = codes[begins[0] : ends[-1]][inside[begins[0] : ends[-1]]]
        lengths = ends - begins
        starts = np.cumsum(lengths) - lengths
        place = np.arange(len(letters)) - np.repeat(starts, lengths)
        factors = _factors(0, 1 << int(lengths.max()).bit_length())
        found[first : first + _BLOCK] = np.add.reduceat((letters + np.uint64(1)) * factors[place], starts)
    found ^= found >> np.uint64(32)
    found *= _MIX
    found ^= found >> np.uint64(29)
    return found


def shingles(text: str, size: int) -> np.ndarray:
    """Return hashes of the distinct runs of ``size`` words of a text, in lower case and without punctuation.

    uint64 [n], sorted. A text with fewer words is one run; a text without words has none.
    """
    hashes = word_hashes(text.lower())
    if not len(hashes):
        return hashes
    length = max(len(hashes) - size + 1, 1)
    total = np.zeros(length, np.uint64)
    for place, factor in enumerate(_factors(size, size)[: len(hashes)]):
        total += hashes[place : place + length] * factor  # the sum depends on the order; it wraps at 64 bits
    total.sort()
    is_new: npt.NDArray[np.bool_] = np.append(True, total[1:] != total[:-1])
    return total[is_new]


def jaccard(one: np.ndarray, other: np.ndarray) -> float:
    """Return the share of common shingles: uint64 [n] and [m], each sorted and distinct."""
    if not len(one) or not len(other):
        return 0.0
    common = len(np.intersect1d(one, other, assume_unique=True))
    return common / (len(one) + len(other) - common)
