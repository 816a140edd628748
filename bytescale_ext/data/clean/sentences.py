"""Deduplication of sentences by datatrove: sentences that several documents share stay in the first."""

from __future__ import annotations

from bisect import bisect_left
from pathlib import Path
from typing import Final

import numpy as np
from datatrove.data import Document, DocumentsPipeline
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.dedup import SentenceDedupFilter, SentenceDedupSignature
from datatrove.pipeline.dedup.sentence_dedup import SentDedupConfig
from datatrove.utils.hashing import HashConfig
from datatrove.utils.text import TextNormConfig
from datatrove.utils.typeshelper import ExtensionHelperSD

from bytescale_ext.data.clean.recipe import Recipe
from bytescale_ext.data.clean.tally import Tally
from bytescale_ext.data.clean.words import RULES, letters_per_word, num_words
from bytescale_ext.data.tasks.runs import hash_range, joined, sorted_by
from bytescale_ext.new_file import new_file

_PLACE: Final = np.dtype([("doc", "<u4"), ("sent", "<u2")])
_SIGNATURE: Final = np.dtype([("hash", "<u8"), ("doc", "<u4"), ("sent", "<u2")])  # as datatrove writes them
_TASK_SIGNATURE: Final = np.dtype([("hash", "<u8"), ("task", "<u4"), ("doc", "<u4"), ("sent", "<u2")])
_MOST_SENTENCES: Final = 1 << 16  # datatrove stores the number of a sentence in 16 bits


def sentence_config(recipe: Recipe) -> SentDedupConfig:
    """Return datatrove's settings. A document stays if any of its text remains."""
    return SentDedupConfig(
        n_sentences=recipe.sentences,
        min_doc_words=0,
        min_num_sentences=0,
        norm_config=TextNormConfig(norm_numbers=False),
        hash_config=HashConfig(precision=64, hash_fc="sha1"),
    )


class SentenceSignatures(SentenceDedupSignature):  # type: ignore[misc]  # datatrove has no types
    """datatrove's signature step, without sentences past its limit and without short runs such as closing brackets."""

    def __init__(self, recipe: Recipe, folder: Path) -> None:
        super().__init__(str(folder), config=sentence_config(recipe), language=RULES)
        self.min_words = recipe.min_words

    def get_hashes(self, doc: Document, doc_idx: int) -> list[tuple[int, int, int]]:
        """Return (hash, document, first sentence) of each run of sentences."""
        counts = [_num_words(sentence) for sentence in RULES.sent_tokenize(doc.text)]
        size = self.config.n_sentences
        if len(counts) < size:
            return []
        words = np.convolve(counts, np.ones(size, np.int64), "valid")
        hashes = super().get_hashes(doc, doc_idx)
        return [row for row in hashes if row[2] < _MOST_SENTENCES and words[row[2]] >= self.min_words]


def _num_words(sentence: str) -> int:
    """Return the number of words between spaces, or about the number of words in scripts without spaces."""
    return max(len(sentence.split()), num_words(sentence)) if letters_per_word(sentence) > 1 else len(sentence.split())


class FindRepeated(PipelineStep):  # type: ignore[misc]  # datatrove has no types
    """Finds the runs of sentences that an earlier document has. A task compares the hashes of its range.

    datatrove's step does this in one task, and its choice of the first document depends on the number of tasks.
    """

    name = "repeated"
    type = "dedup"

    def __init__(self, signatures: Path, output: Path) -> None:
        super().__init__()
        self.signatures = signatures
        self.output = output

    def run(self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1) -> None:
        """Write the repeated runs of sentences of each task, as datatrove does."""
        begin, end = hash_range(rank, world_size)
        parts = []
        for task in range(world_size):
            path = self.signatures / "0000" / f"{task:05d}{ExtensionHelperSD.stage_1_signature}"
            rows = np.memmap(path, _SIGNATURE, "r") if path.stat().st_size else np.empty(0, _SIGNATURE)
            first, last = (bisect_left(rows, limit, key=lambda row: int(row["hash"])) for limit in (begin, end))
            part = np.empty(last - first, _TASK_SIGNATURE)
            part["task"] = task
            for name in _SIGNATURE.names or ():
                part[name] = rows[name][first:last]
            parts.append(part)
        found = sorted_by(joined(parts, _TASK_SIGNATURE), ("hash", "task", "doc", "sent"))
        repeated = found[1:][found["hash"][1:] == found["hash"][:-1]]
        folder = self.output / f"{rank:04d}"
        folder.mkdir(parents=True, exist_ok=True)
        for task in range(world_size):
            chosen = repeated[repeated["task"] == task]
            if len(chosen):
                with new_file(folder / f"{task:05d}{ExtensionHelperSD.stage_2_duplicates}", is_binary=True) as stream:
                    stream.write(np.sort(chosen[["doc", "sent"]].astype(_PLACE)).tobytes())


class SentenceFilter(SentenceDedupFilter):  # type: ignore[misc]  # datatrove has no types
    """datatrove's filter step, which also counts the removed bytes."""

    def __init__(self, recipe: Recipe, folder: Path, tallies: Path) -> None:
        super().__init__(str(folder), config=sentence_config(recipe), language=RULES)
        self.tallies = tallies
        self.tally = Tally()

    def remove_dup_sentences(self, doc: Document, du_lines: np.ndarray) -> tuple[str, str]:
        """Return the remaining text, and the whole text with the removed sentences marked.

        ``du_lines``: first sentence of each repeated run, [n].
        """
        text, marked = super().remove_dup_sentences(doc, du_lines)
        source = str(doc.metadata["source"])
        before, after = (len(part.encode("utf-8", "surrogatepass")) for part in (doc.text, text))
        self.tally.add(source, "sentences", num_bytes=before - after)
        if not text:
            self.tally.add(source, "sentences only")
        self.tally.example("sentences", doc.id, marked.partition(">>>")[2].partition("<<<")[0])
        return text, marked

    def close(self, rank: int) -> None:
        """Write the tally of a task, and start a new tally."""
        self.tally.save(self.tallies / f"sentences-{rank:05d}.json")
        self.tally = Tally()
