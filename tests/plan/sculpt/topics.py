"""Synthetic corpora of documents with known topics."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bytescale_ext.data.samples.lengths import sample_table
from bytescale_ext.plan.sculpt.pieces import Pieces

CONTEXT = 100


def unit(vectors: np.ndarray) -> np.ndarray:
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def pieces_of(lengths: Sequence[int], topics: Sequence[int], context: int = CONTEXT, noise: float = 0.3) -> Pieces:
    """Return the pieces of documents of these lengths, each near the axis of its topic."""
    table = sample_table(np.array(lengths), context)
    random = np.random.RandomState(5)
    document = table.document.astype(np.int64)
    vectors = np.eye(16)[np.array(topics)[document]] + noise * random.standard_normal((len(document), 16)) / 4
    return Pieces(document, table.start, table.length, unit(vectors))


def corpus(num_documents: int = 300, num_topics: int = 6, longest: int = 250) -> tuple[Pieces, np.ndarray, np.ndarray]:
    """Return pieces, and lengths and topics of documents. Lengths are from 1 to ``longest``, mostly short."""
    random = np.random.RandomState(3)
    lengths = np.minimum(longest, random.lognormal(3, 1, num_documents).astype(np.int64) + 1)
    topics = random.randint(0, num_topics, num_documents)
    return pieces_of(lengths.tolist(), topics.tolist()), lengths, topics
