"""A small data set of byte-level texts about known topics."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from bytescale_ext.data.corpus.tokens import CorpusTokens, open_tokens
from bytescale_ext.data.samples.texts import encoder
from tests.data.sources import write_data_set

TOPICS = (
    "harbour sailor anchor tide vessel mast cargo lighthouse",
    "orchard apple blossom cider branch harvest ladder basket",
    "violin sonata tempo orchestra chord melody bow rehearsal",
    "glacier summit rope crevasse ridge altitude snow bivouac",
)


def texts(num_documents: int = 120, longest: int = 60, seed: int = 0) -> tuple[list[str], list[int]]:
    """Return texts of random words, and the topic of each."""
    random = np.random.RandomState(seed)
    topics = random.randint(0, len(TOPICS), num_documents).tolist()
    counts = random.randint(3, longest, num_documents).tolist()
    made = [" ".join(random.choice(TOPICS[one].split(), n)) for one, n in zip(topics, counts, strict=True)]
    return made, topics


def write_texts(prefix: Path, documents: list[str]) -> CorpusTokens:
    """Write texts as a byte-level data set and open it."""
    encode = encoder(None)
    write_data_set(prefix, [[encode(text.encode())[0].tolist()] for text in documents])
    return open_tokens(str(prefix))
