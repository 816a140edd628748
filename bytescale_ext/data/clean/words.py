"""Words, sentences and shingles of a text by simple rules, without a model or a download."""

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
    """Tokenizer for datatrove's steps, instead of the tokenizers of spaCy or NLTK."""

    def __init__(self) -> None:
        super().__init__("rules")

    def word_tokenize(self, text: str) -> list[str]:
        """Return words and single punctuation marks."""
        return _WORD.findall(text)

    def span_tokenize(self, text: str) -> list[tuple[int, int]]:
        """Return (begin, end) of each sentence that is not blank."""
        return [match.span() for match in _SENTENCE.finditer(text) if not match.group().isspace()]

    def sent_tokenize(self, text: str) -> list[str]:
        """Return the sentences, without surrounding white space."""
        return [text[begin:end].strip() for begin, end in self.span_tokenize(text)]


RULES: Final = RuleTokenizer()


@cache
def _is_letter(codes: int) -> np.ndarray:
    """Return whether each of the first ``codes`` code points is part of a word: bool [codes]."""
    characters = "".join(map(chr, range(codes)))
    is_letter = np.zeros(codes, bool)
    is_letter[[match.start() for match in _LETTER.finditer(characters)]] = True
    return is_letter


@cache
def _factors(seed: int, count: int) -> np.ndarray:
    """Return random odd 64-bit numbers, uint64 [count]. A larger count only appends numbers."""
    return np.random.RandomState(seed).randint(0, 1 << 62, count, dtype=np.uint64) * np.uint64(2) + np.uint64(1)


def word_hashes(text: str) -> np.ndarray:
    """Return the hash of each word of a text, uint64 [words]. Hashes are equal in all processes.

    The hash mixes the sum of the word's characters, each multiplied by a factor that depends on its position.
    """
    plain = text.isascii()
    wide = "utf-32-le", "surrogatepass"
    codes = np.frombuffer(text.encode(), np.uint8) if plain else np.frombuffer(text.encode(*wide), "<u4")
    inside = _is_letter(128 if plain else sys.maxunicode + 1)[codes]
    edges = np.flatnonzero(np.diff(inside, prepend=False, append=False))
    hashes = np.empty(len(edges) // 2, np.uint64)
    for first in range(0, len(hashes), _BLOCK):  # blocks limit the memory for long texts
        begins, ends = edges[2 * first : 2 * (first + _BLOCK)].reshape(-1, 2).T
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

    A shingle is a run of ``size`` words in lower case, without punctuation. A text with fewer words is a single
    shingle; a text without words has none.
    """
    hashes = word_hashes(text.lower())
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
