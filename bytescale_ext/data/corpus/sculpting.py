"""Windows of a data set: its tokens, what they are about, the windows, their check and their figures."""

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
    """The windows of a data set.

    Attributes:
        pieces: its documents, cut at the context.
        made: the windows and clusters, checked.
        num_long: documents longer than the context, which no window can hold whole.
    """

    pieces: Pieces
    made: Sculpted
    num_long: int

    @property
    def cluster_tokens(self) -> np.ndarray:
        """Tokens of each cluster, the largest first: int64 [clusters]."""
        tokens = np.bincount(self.made.cluster, weights=self.pieces.length)
        return np.sort(tokens.astype(np.int64))[::-1]


def embedded_pieces(corpus: CorpusTokens, context: int, embedder: str | None, seed: int) -> Pieces:
    """Return the documents of a data set, cut at every ``context`` tokens, and what each piece is about."""
    table = sample_table(corpus.lengths, context)
    vectors = embed(corpus, table, embedder, seed)
    return Pieces(table.document.astype(np.int64), table.start, table.length, vectors)


def check_context(lengths: np.ndarray, settings: SculptSettings) -> None:
    """Raise ValueError where no document may be cut and none fits. ``lengths``: [documents] tokens."""
    shortest = int(lengths[lengths > 0].min())
    if settings.overflow == "none" and shortest > settings.context:
        raise ValueError(
            f"the shortest document has {shortest} tokens, and a window of --context {settings.context} holds none of "
            f"them whole: give --context {shortest} or more, or --overflow split"
        )


def sculpt_corpus(corpus: CorpusTokens, settings: SculptSettings, embedder: str | None) -> SculptedCorpus:
    """Return the windows of a data set, checked. Raises ValueError where none can be made."""
    check_context(corpus.lengths, settings)
    pieces = embedded_pieces(corpus, settings.context, embedder, settings.seed)
    made = sculpt(pieces, settings, nearest_centres)
    check_windows(made.table, corpus.lengths, settings.context, settings.overflow)
    return SculptedCorpus(pieces, made, int(np.count_nonzero(corpus.lengths > settings.context)))
