"""Words, sentences and shingles of a text by plain rules, which need no model and no download."""

from __future__ import annotations

import hashlib
import re
from typing import Final

import numpy as np
from datatrove.utils.word_tokenizers import WordTokenizer

_WORD: Final = re.compile(r"\w+|[^\w\s]")
_LETTERS: Final = re.compile(r"\w+")
# A sentence ends with its line, or with punctuation before white space.
_SENTENCE: Final = re.compile(r"[^\n]+?(?:[.!?\u2026\u3002\uff01\uff1f][\"')\]]*(?=\s)|(?=\n)|$)")
_CACHED_WORDS: Final = 1 << 20


class RuleTokenizer(WordTokenizer):  # type: ignore[misc]
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


class _WordHashes(dict[str, int]):
    """Hashes of 64 bits, the same in every process; begins anew when it holds many."""

    def __missing__(self, word: str) -> int:
        if len(self) >= _CACHED_WORDS:
            self.clear()
        digest = hashlib.blake2b(word.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        self[word] = int.from_bytes(digest, "little")
        return self[word]


WORD_HASHES: Final = _WordHashes()


def shingles(text: str, size: int) -> np.ndarray:
    """Return hashes of the distinct runs of ``size`` words of a text, in lower case and without punctuation.

    uint64 [n], sorted. A text with fewer words is one run; a text without words has none.
    """
    words = _LETTERS.findall(text.lower())
    if not words:
        return np.empty(0, np.uint64)
    hashes = np.array([WORD_HASHES[word] for word in words], np.uint64)
    length = max(len(words) - size + 1, 1)
    # Odd factors make the sum depend on the order; it wraps at 64 bits.
    factors = np.random.RandomState(size).randint(0, 1 << 62, size, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    total = np.zeros(length, np.uint64)
    for place in range(min(size, len(words))):
        total += hashes[place : place + length] * factors[place]
    return np.unique(total)


def jaccard(one: np.ndarray, other: np.ndarray) -> float:
    """Return the share of common shingles: uint64 [n] and [m], each sorted and distinct."""
    if not len(one) or not len(other):
        return 0.0
    common = len(np.intersect1d(one, other, assume_unique=True))
    return common / (len(one) + len(other) - common)
