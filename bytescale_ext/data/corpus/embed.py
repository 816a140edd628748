"""Embeddings of pieces of documents as unit vectors.

The default embedder needs no model: it counts hashed words (token ids, unless tokens are bytes) and applies TF-IDF and
a truncated SVD. ``hf:PATH`` selects a sentence-transformers model in a folder instead.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from bytescale_ext.data.corpus.tokens import CorpusTokens, text_of
from bytescale_ext.data.samples.lengths import SampleTable
from bytescale_ext.new_file import new_file

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

MODEL: Final = "hf:"
_FEATURES: Final = 1 << 18
_WORD: Final = re.compile(r"\b\w\w+\b")
_RUNS: Final = {2: (1, 2), 4: (2, 3)}  # lengths of runs, by the usual number of letters of a word
_DIMENSIONS: Final = 128
FITTED: Final = 20_000  # pieces that the SVD is fitted to, at most


def check_embedder(embedder: str | None) -> None:
    """Raise ValueError unless this machine can run an embedder: None for the default, or ``hf:PATH``."""
    if importlib.util.find_spec("sklearn") is None or importlib.util.find_spec("faiss") is None:
        raise ValueError("scikit-learn and faiss are needed: pip install 'bytescale-megatron[data]'")
    if embedder is None:
        return
    path = embedder.removeprefix(MODEL)
    if path == embedder or not path:
        raise ValueError(f"--embedder {embedder}: give hf:PATH, the folder of a model, or omit the flag")
    if not Path(path).is_dir():
        raise ValueError(f"--embedder {embedder}: there is no folder {path}")
    if importlib.util.find_spec("sentence_transformers") is None:
        raise ValueError(f"--embedder {embedder}: sentence-transformers is not installed")


@dataclass(frozen=True, eq=False, slots=True)
class WordSpace:
    """Weights and directions that turn counts of hashed words into vectors.

    Attributes:
        features: features that several documents have, int64 [m].
        rarity: weight of each of them, float32 [m].
        components: main directions, float32 [d, m]; without any, all vectors are equal.
    """

    features: np.ndarray
    rarity: np.ndarray
    components: np.ndarray

    def save(self, path: Path) -> None:
        """Write the space to a file."""
        with new_file(path, is_binary=True) as stream:
            np.savez(stream, features=self.features, rarity=self.rarity, components=self.components)


def load_space(path: Path) -> WordSpace:
    """Read a space that was saved."""
    with np.load(path, allow_pickle=False) as values:
        return WordSpace(**{name: values[name] for name in values.files})


def embed(corpus: CorpusTokens, table: SampleTable, embedder: str | None, seed: int) -> np.ndarray:
    """Return a unit vector of each piece, float32 [pieces, d]; zeros for a piece without words.

    Args:
        corpus: tokens of the corpus.
        table: pieces of documents.
        embedder: None for the default, or ``hf:PATH``.
        seed: seed of the SVD, and of the choice of pieces that it is fitted to.

    Raises:
        ValueError: the embedder needs text, but the tokens are not bytes.
    """
    is_bytes = corpus.is_bytes
    if embedder is None:
        return reduced(counts_of(corpus.pieces(table), is_bytes), seed)
    check_text(embedder, corpus.prefix, is_bytes)
    return by_model(embedder.removeprefix(MODEL), corpus.texts(table))


def check_text(embedder: str | None, prefix: str, is_bytes: bool) -> None:
    """Raise ValueError if the embedder needs text, but the tokens of a data set are not bytes."""
    if embedder is not None and not is_bytes:
        raise ValueError(f"--embedder {embedder} needs text, and the tokens of {prefix} are not bytes")


def counts_of(pieces: Iterable[np.ndarray], is_bytes: bool) -> csr_matrix:
    """Return the count of each hashed word in each piece: float32 [pieces, features].

    Args:
        pieces: token ids of each piece, [length].
        is_bytes: whether tokens are bytes; if not, each token id is a word.
    """
    return word_counts(map(text_of, pieces)) if is_bytes else token_counts(pieces)


def word_counts(texts: Iterable[str]) -> csr_matrix:
    """Return the count of each hashed word in each text: float32 [texts, features]."""
    from sklearn.feature_extraction.text import HashingVectorizer

    hashing = HashingVectorizer(
        analyzer=_words, n_features=_FEATURES, alternate_sign=False, norm=None, dtype=np.float32
    )
    return hashing.transform(texts)


def _words(text: str) -> list[str]:
    """Return the words of two letters or more of a text.

    A text without spaces between words gives short runs of letters, which do not cross blanks. If a text of such a
    script has blanks between its words, it gives these words.
    """
    from bytescale_ext.data.clean.words import RULES, letters_per_word, normal

    lower = normal(text)
    size = letters_per_word(lower)
    if size == 1:
        return (
            _WORD.findall(lower) if lower.isascii() else [word for word in RULES.word_tokenize(lower) if len(word) > 1]
        )
    parts = [[word for word in RULES.word_tokenize(part) if word[0].isalnum()] for part in lower.split()]
    if len(parts) > 1 and sum(map(len, parts)) <= 2 * size * len(parts):
        return ["".join(part) for part in parts if part]
    places = ((part, place, run) for part in parts for run in _RUNS[size] for place in range(len(part) - run + 1))
    return ["".join(part[place : place + run]) for part, place, run in places]


def token_counts(pieces: Iterable[np.ndarray]) -> csr_matrix:
    """Return the count of each token id in each piece, float32 [pieces, features]; ``pieces``: token ids [length]."""
    from scipy.sparse import csr_matrix

    ids, counts = [], []
    for piece in pieces:
        piece_ids, piece_counts = np.unique(piece.astype(np.int64) % _FEATURES, return_counts=True)
        ids.append(piece_ids)
        counts.append(piece_counts.astype(np.float32))
    bounds = np.cumsum([0, *map(len, ids)])
    return csr_matrix((np.concatenate(counts), np.concatenate(ids), bounds), shape=(len(ids), _FEATURES))


def reduced(counts: csr_matrix, seed: int) -> np.ndarray:
    """Return unit vectors, float32 [n, d], of rows of counts [n, features]."""
    return vectors_of(counts, fit_space(counts, seed))


def fit_space(counts: csr_matrix, seed: int) -> WordSpace:
    """Fit a space to rows of counts [n, features].

    Features that occur in a single row tell nothing about similarity and are dropped.
    """
    from sklearn.decomposition import TruncatedSVD
    from sklearn.feature_extraction.text import TfidfTransformer

    shared = np.flatnonzero(np.bincount(counts.indices, minlength=_FEATURES) >= 2)
    num_rows = counts.shape[0]
    if len(shared) < 2 or num_rows < 3:
        return WordSpace(shared, np.ones(len(shared), np.float32), np.empty((0, len(shared)), np.float32))
    tfidf = TfidfTransformer(sublinear_tf=True)
    weights = tfidf.fit_transform(counts[:, shared])
    fitted = np.sort(np.random.RandomState(seed % 2**32).permutation(num_rows)[:FITTED])
    dimensions = min(_DIMENSIONS, len(fitted) - 1, len(shared) - 1)
    svd = TruncatedSVD(dimensions, n_iter=3, random_state=seed % 2**32).fit(weights[fitted])
    return WordSpace(shared, tfidf.idf_, svd.components_)


def vectors_of(counts: csr_matrix, space: WordSpace) -> np.ndarray:
    """Return unit vectors, float32 [n, d], of rows of counts [n, features]; zeros for a row without known words."""
    from sklearn.feature_extraction.text import TfidfTransformer

    if not len(space.components):
        return np.ones((counts.shape[0], 1), dtype=np.float32)
    tfidf = TfidfTransformer(sublinear_tf=True)
    tfidf.idf_ = space.rarity
    return unit(tfidf.transform(counts[:, space.features]) @ space.components.T)


def by_model(path: str, texts: Iterable[str]) -> np.ndarray:
    """Return unit vectors, float32 [texts, d], from a sentence-transformers model in a folder."""
    from sentence_transformers import SentenceTransformer

    return unit(np.asarray(SentenceTransformer(path, local_files_only=True).encode(list(texts))))


def unit(vectors: np.ndarray) -> np.ndarray:
    """Return vectors [n, d], scaled to length 1, as float32; zeros stay zeros."""
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    units: npt.NDArray[np.float32] = np.divide(vectors, norms, out=np.zeros_like(vectors), where=norms > 0).astype(
        np.float32
    )
    return units
