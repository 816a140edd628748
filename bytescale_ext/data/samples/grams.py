"""Rows of an n-gram memory: hashes of the last tokens of one document, which the loader makes beside the tokens.

Engram (Cheng et al. 2026) looks up embeddings by hashes of the last tokens. Rows follow from token ids alone, so they
are known before the micro-batch is computed, on every pipeline stage and tensor-parallel rank, without communication.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

_GOLDEN: Final = 0x9E3779B97F4A7C15
_WORD: Final = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class GramRule:
    """Which rows of a table belong to a token.

    Attributes:
        orders: an n-gram is the token and the n - 1 before it, for each n of these.
        heads: rows of each n-gram, by different hashes.
        num_rows: of the table.
        seed: of the hashes.
    """

    orders: tuple[int, ...]
    heads: int
    num_rows: int
    seed: int = 0

    @property
    def num_columns(self) -> int:
        """Rows of each token."""
        return len(self.orders) * self.heads

    @property
    def num_before(self) -> int:
        """The most tokens before a token that its rows depend on."""
        return max(self.orders) - 1

    @property
    def fingerprint(self) -> int:
        """A number of 63 bits that other rules do not share."""
        return _scrambled_word(*self.orders, 0, self.heads, self.num_rows, self.seed) >> 1

    def rows_of(self, tokens: np.ndarray, num_before: int = 0) -> np.ndarray:
        """Return the rows int64 [n, num_columns] of tokens: order by order, head by head.

        Where the document has fewer tokens, the missing ones count as one more token id, the same for all documents.

        Args:
            tokens: ids [num_before + n] of one document.
            num_before: how many of them are only read as the beginning of n-grams; fewer than ``self.num_before`` only
                if the document begins with them.
        """
        reach = self.num_before
        known = tokens[max(0, num_before - reach) :].astype(np.uint64) + np.uint64(1)
        ids = np.concatenate([np.zeros(reach - min(num_before, reach), np.uint64), known])
        num_tokens = len(tokens) - num_before
        columns = []
        for order in self.orders:
            gram = np.full(num_tokens, _scrambled_word(self.seed, order), np.uint64)
            for lag in range(order):
                gram = _scrambled(gram ^ ids[reach - lag : reach - lag + num_tokens])
            heads = (np.uint64(_scrambled_word(self.seed, order, head)) for head in range(self.heads))
            columns += [_scrambled(gram ^ head) % np.uint64(self.num_rows) for head in heads]
        return np.stack(columns, axis=1).astype(np.int64)


def numbers(text: str) -> tuple[int, ...]:
    """Return numbers written as "2,3", each once and ascending. Raises ValueError for anything else, and below 1."""
    found = tuple(sorted({int(part) for part in text.split(",")}))
    if found[0] < 1:
        raise ValueError(f"{text} are not numbers from 1 on")
    return found


def _scrambled(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return 64-bit words [n] whose bits all depend on all bits (the finalizer of SplitMix64, Steele et al. 2014)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _scrambled_word(*numbers: int) -> int:
    """Return one 64-bit word that depends on some small numbers and their order."""
    word = np.zeros(1, np.uint64)
    for number in numbers:
        word = _scrambled(word + np.uint64((number + 1) * _GOLDEN & _WORD))
    return int(word[0])
