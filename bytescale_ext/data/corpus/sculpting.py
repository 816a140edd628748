"""Windows of related documents of a data set: embedding, sculpting and check."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bytescale_ext.data.corpus.embed import embed
from bytescale_ext.data.corpus.neighbours import nearest_centres
from bytescale_ext.data.corpus.tokens import CorpusTokens
from bytescale_ext.data.samples.lengths import sample_table
from bytescale_ext.plan.sculpt.check import check_windows
from bytescale_ext.plan.sculpt.pieces import Pieces
from bytescale_ext.plan.sculpt.sculpt import Sculpted, SculptSettings, sculpt


@dataclass(frozen=True, eq=False, slots=True)
class SculptedCorpus:
    """Windows of a data set.

    Attributes:
        pieces: pieces of documents of at most one context.
        made: windows and clusters, which passed their check.
        num_long: number of documents longer than the context, which no window can contain whole.
    """

    pieces: Pieces
    made: Sculpted
    num_long: int

    @property
    def cluster_tokens(self) -> np.ndarray:
        """Tokens of each cluster, largest first: int64 [clusters]."""
        tokens = np.bincount(self.made.cluster, weights=self.pieces.length)
        return np.sort(tokens.astype(np.int64))[::-1]


def embedded_pieces(corpus: CorpusTokens, context: int, embedder: str | None, seed: int) -> Pieces:
    """Return the documents of a data set, split at every ``context`` tokens, with the embedding of each piece."""
    table = sample_table(corpus.lengths, context)
    vectors = embed(corpus, table, embedder, seed)
    return Pieces(table.document.astype(np.int64), table.start, table.length, vectors)


def sculpt_corpus(corpus: CorpusTokens, settings: SculptSettings, embedder: str | None) -> SculptedCorpus:
    """Return the checked windows of a data set; documents longer than a window are cut.

    Raises ValueError if no document has tokens.
    """
    if not corpus.lengths.any():
        raise ValueError(f"{corpus.prefix}: its {len(corpus.lengths)} documents have no tokens")
    pieces = embedded_pieces(corpus, settings.context, embedder, settings.seed)
    sculpted = sculpt(pieces, settings, nearest_centres)
    check_windows(sculpted.table, corpus.lengths, settings.context, settings.overflow)
    return SculptedCorpus(pieces, sculpted, int(np.count_nonzero(corpus.lengths > settings.context)))
