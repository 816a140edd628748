"""Row numbers of an n-gram memory: hashes of the last few tokens of a document, computed by the loader.

Engram (Cheng et al. 2026) looks up embeddings by hashes of the last few tokens. Row numbers depend only on token ids.
So every pipeline stage and tensor-parallel rank knows them before the forward pass, without communication.
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
    """Rule that maps a token to rows of a table.

    Attributes:
        orders: lengths n of the n-grams; an n-gram consists of the token and the n - 1 tokens before it.
        heads: number of rows of each n-gram, given by different hashes.
        num_rows: number of rows of the table.
        seed: seed of the hashes.
    """

    orders: tuple[int, ...]
    heads: int
    num_rows: int
    seed: int = 0

    @property
    def num_columns(self) -> int:
        """Number of rows of each token."""
        return len(self.orders) * self.heads

    @property
    def num_before(self) -> int:
        """Number of earlier tokens on which the rows of a token depend."""
        return max(self.orders) - 1

    @property
    def fingerprint(self) -> int:
        """63-bit hash of the rule."""
        return _scrambled_word(*self.orders, 0, self.heads, self.num_rows, self.seed) >> 1

    def rows_of(self, tokens: np.ndarray, num_before: int = 0) -> np.ndarray:
        """Return the rows of tokens, int64 [n, num_columns], ordered by n-gram length and then by head.

        Positions before the start of the document count as a special token, which is the same for all documents.

        Args:
            tokens: token ids of one document, [num_before + n].
            num_before: number of leading tokens that are context only. It may be smaller than ``self.num_before`` only
                if ``tokens`` begins at the start of the document.
        """
        reach = self.num_before
        shifted = tokens[max(0, num_before - reach) :].astype(np.uint64) + np.uint64(1)
        ids = np.concatenate([np.zeros(reach - min(num_before, reach), np.uint64), shifted])
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
    """Return the distinct numbers of a text such as "2,3", ascending. Raises ValueError for other text and below 1."""
    values = tuple(sorted({int(part) for part in text.split(",")}))
    if values[0] < 1:
        raise ValueError(f"{text} are not numbers from 1 on")
    return values


def _scrambled(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return hashes of 64-bit words [n] (the finalizer of SplitMix64, Steele et al. 2014)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _scrambled_word(*numbers: int) -> int:
    """Return a 64-bit hash of a sequence of small numbers."""
    word = np.zeros(1, np.uint64)
    for number in numbers:
        word = _scrambled(word + np.uint64((number + 1) * _GOLDEN & _WORD))
    return int(word[0])
