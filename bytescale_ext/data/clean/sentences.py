"""Sentences that several documents share stay in one of them: datatrove's steps, for documents of any length."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
from datatrove.data import Document
from datatrove.pipeline.dedup import SentenceDedupFilter, SentenceDedupSignature
from datatrove.pipeline.dedup.sentence_dedup import SentDedupConfig
from datatrove.utils.hashing import HashConfig
from datatrove.utils.text import TextNormConfig

from bytescale_ext.data.clean.recipe import Recipe
from bytescale_ext.data.clean.tally import Tally
from bytescale_ext.data.clean.words import RULES

_NUMBERED: Final = 1 << 16  # datatrove keeps the number of a sentence in 16 bits


def sentence_config(recipe: Recipe) -> SentDedupConfig:
    """Return datatrove's settings; a document stays if any text of it does."""
    return SentDedupConfig(
        n_sentences=recipe.sentences,
        min_doc_words=0,
        min_num_sentences=0,
        norm_config=TextNormConfig(norm_numbers=False),
        hash_config=HashConfig(precision=64, hash_fc="sha1"),
    )


class SentenceSignatures(SentenceDedupSignature):  # type: ignore[misc]  # datatrove has no types
    """datatrove's step without runs of few words, such as closing brackets, and without what it cannot number."""

    def __init__(self, recipe: Recipe, folder: Path) -> None:
        super().__init__(str(folder), config=sentence_config(recipe), language=RULES)
        self.min_words = recipe.min_words

    def get_hashes(self, doc: Document, doc_idx: int) -> list[tuple[int, int, int]]:
        """Return (hash, document, first sentence) of each run of sentences."""
        counts = [len(sentence.split()) for sentence in RULES.sent_tokenize(doc.text)]
        size = self.config.n_sentences
        if len(counts) < size:
            return []
        words = np.convolve(counts, np.ones(size, np.int64), "valid")
        hashes = super().get_hashes(doc, doc_idx)
        return [one for one in hashes if one[2] < _NUMBERED and words[one[2]] >= self.min_words]


class SentenceFilter(SentenceDedupFilter):  # type: ignore[misc]  # datatrove has no types
    """datatrove's step, which also counts the bytes that it removes."""

    def __init__(self, recipe: Recipe, folder: Path, told: Path) -> None:
        super().__init__(str(folder), config=sentence_config(recipe), language=RULES)
        self.told = told
        self.tally = Tally()

    def remove_dup_sentences(self, doc: Document, du_lines: np.ndarray) -> tuple[str, str]:
        """Return the text that stays, and the whole with marks. ``du_lines``: [n] first sentences of repeated runs."""
        text, marked = super().remove_dup_sentences(doc, du_lines)
        source = str(doc.metadata["source"])
        sizes = [len(one.encode("utf-8", "surrogatepass")) for one in (doc.text, text)]
        self.tally.add(source, "sentences", num_bytes=sizes[0] - sizes[1])
        if not text:
            self.tally.add(source, "sentences only")
        self.tally.example("sentences", doc.id, marked.partition(">>>")[2].partition("<<<")[0])
        return text, marked

    def close(self, rank: int) -> None:
        """Write the counts of a task, and begin anew."""
        self.tally.save(self.told / f"sentences-{rank:05d}.json")
        self.tally = Tally()
