"""Documents of several data sets in the shares of a mixture, for windows over all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bytescale_ext.data.corpus.tokens import map_tokens
from bytescale_ext.data.samples.idx_file import PART
from bytescale_ext.data.samples.lengths import check_indexed_dataset
from bytescale_ext.json_input import stored_text


@dataclass(frozen=True, slots=True)
class Blend:
    """Data sets and how often their documents occur.

    A document that occurs 1.3 times on average is in the first pass and, with a probability of 0.3, in the second.
    Windows are made in one pass at a time, so no window has a document twice.

    Attributes:
        prefixes: data sets.
        often: mean number of times that a document of each data set occurs.
        seed: seed of the choice of documents.
    """

    prefixes: tuple[str, ...]
    often: tuple[float, ...]
    seed: int

    @property
    def num_passes(self) -> int:
        """Number of passes."""
        return max(1, int(np.ceil(max(self.often))))

    @property
    def dtype(self) -> np.dtype:
        """Type that holds the token ids of all data sets."""
        return np.result_type(*(map_tokens(prefix).index.dtype for prefix in self.prefixes))

    def documents(self, number: int) -> Iterator[np.ndarray]:
        """Yield the token ids, [length], of the documents of pass ``number``, without empty documents."""
        for place, (prefix, often) in enumerate(zip(self.prefixes, self.often, strict=True)):
            corpus = map_tokens(prefix)
            random = np.random.RandomState([self.seed % 2**32, place])
            for begin in range(0, corpus.index.num_documents, PART):
                documents = np.arange(begin, min(begin + PART, corpus.index.num_documents))
                chosen = documents[random.random_sample(len(documents)) < often - number]
                bounds = corpus.index.first_tokens(chosen), corpus.index.first_tokens(chosen + 1)
                for first, end in zip(*(each.tolist() for each in bounds), strict=True):
                    if first < end:
                        yield corpus.tokens[first:end]


def blend_of(weighted: Sequence[tuple[float | None, str]], seed: int) -> Blend:
    """Return the blend of data sets with as many tokens as all of them together.

    Args:
        weighted: (share of the tokens, prefix) of each data set; shares are scaled to a sum of 1. Without shares each
            document occurs once.
        seed: seed of the choice of documents.

    Raises:
        ValueError: a data set is missing or damaged.
    """
    prefixes = tuple(prefix for _, prefix in weighted)
    tokens = np.array([check_indexed_dataset(prefix).num_tokens for prefix in prefixes], float)
    weights = np.array([np.nan if weight is None else weight for weight, _ in weighted])
    if np.isnan(weights).any():
        return Blend(prefixes, (1.0,) * len(prefixes), seed)
    return Blend(prefixes, tuple((weights / weights.sum() * tokens.sum() / tokens).tolist()), seed)


def read_mixture(path: Path) -> list[tuple[float | None, str]]:
    """Return (weight, prefix) of each data set of a file of ``bytescale data mix``.

    Raises:
        ValueError: the file has other contents, or no weight above 0.
    """
    words = stored_text(path).split()
    try:
        weights = [float(word) for word in words[::2]]
        if len(words) % 2 or not min(weights) >= 0 or not 0 < sum(weights) < np.inf:
            raise ValueError("give weights and data sets in turn")
    except ValueError as error:
        raise ValueError(f"{path}: not a mixture of bytescale data mix ({error})") from error
    return [(weight, prefix) for weight, prefix in zip(weights, words[1::2], strict=True) if weight > 0]
