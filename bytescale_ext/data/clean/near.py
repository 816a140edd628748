"""Near-duplicates across all sources: MinHash candidates from datatrove, verified by their exact Jaccard similarity."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np
from datatrove.data import DocumentsPipeline
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.dedup import MinhashDedupSignature
from datatrove.pipeline.dedup.minhash import MinhashConfig
from datatrove.utils.hashing import HashConfig

from bytescale_ext.data.clean.duplicates import (
    KeptDocuments,
    candidate_pairs,
    chained_groups,
    choose_kept,
    equal_groups,
    order_of,
)
from bytescale_ext.data.clean.recipe import Recipe
from bytescale_ext.data.clean.shelf import DECISION, ROW, decisions_path, rows_path, save_array, shelved
from bytescale_ext.data.clean.tally import Tally, write_whole
from bytescale_ext.data.clean.words import RULES, jaccard, shingles

_BLOCK: Final = 512  # shingles that are hashed together, to limit the memory for long documents
_ODD: Final = np.uint64(1)
_LARGEST: Final = np.uint64((1 << 64) - 1)


def minhash_config(recipe: Recipe) -> MinhashConfig:
    """Return datatrove's settings, with 64-bit hashes because 32-bit hashes would collide in large corpora."""
    return MinhashConfig(
        n_grams=recipe.ngram,
        num_buckets=recipe.buckets,
        hashes_per_bucket=recipe.hashes,
        hash_config=HashConfig(precision=64, hash_fc="sha1"),
    )


class Signatures(MinhashDedupSignature):  # type: ignore[misc]  # datatrove has no types
    """datatrove's signature step, with our shingles and a limited use of memory."""

    def __init__(self, recipe: Recipe, folder: Path) -> None:
        super().__init__(str(folder), config=minhash_config(recipe), language=RULES)

    def get_shingles(self, text: str) -> np.ndarray:
        """Return the hashes of the distinct shingles: uint64 [n, 1]."""
        return shingles(text, self.config.n_grams).reshape(-1, 1)

    def get_signature(self, shingles: np.ndarray) -> list[list[int]]:
        """Return the smallest hash under each permutation, grouped by bucket. ``shingles``: uint64 [n, 1].

        Multiplying by an odd factor and adding a constant permutes the 64-bit numbers, which wrap. This is faster than
        datatrove's arithmetic modulo a prime.
        """
        a, b = self.parameters
        least = np.full(self.num_hashes, _LARGEST)
        buffer = np.empty((_BLOCK, self.num_hashes), np.uint64)
        for start in range(0, len(shingles), _BLOCK):
            block = shingles[start : start + _BLOCK]
            permuted = np.multiply(block, a | _ODD, out=buffer[: len(block)])
            permuted += b
            np.minimum(least, permuted.min(axis=0), out=least)
        return [bucket.tolist() for bucket in np.split(least, self.config.num_buckets)]


class Decide(PipelineStep):  # type: ignore[misc]  # datatrove has no types
    """Decides in one task which of all documents stay. Candidate pairs are verified on all their shingles."""

    name = "decide"
    type = "dedup"

    def __init__(self, recipe: Recipe, work: Path) -> None:
        super().__init__()
        self.recipe = recipe
        self.work = work
        self.sources = tuple(source.name for source in recipe.sources)

    def run(self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1) -> None:
        """Write the decisions for each task, the tally, and ``duplicates.jsonl``."""
        parts = [np.load(rows_path(self.work, task), allow_pickle=False) for task in range(self.recipe.tasks)]
        rows = np.concatenate([np.empty(0, ROW), *parts])
        offsets = np.cumsum([0, *map(len, parts)])
        first = equal_groups(rows) if "exact" in self.recipe.steps else np.arange(len(rows))
        rank_of = order_of(rows)
        pairs, similarities = np.empty((0, 2), np.int64), np.empty(0)
        if "near" in self.recipe.steps:
            candidates = candidate_pairs(self._groups(offsets), first, rank_of)
            pairs, similarities = self._verified(candidates, offsets)
        result = choose_kept(first, rank_of, pairs)
        by_pair = {(a, b): share for (a, b), share in zip(pairs.tolist(), similarities.tolist(), strict=True)}
        self._report(rows, result, first, by_pair, offsets)
        for task, (begin, end) in enumerate(pairwise(offsets.tolist())):
            decisions = np.zeros(end - begin, DECISION)
            decisions["kept"] = result.copies[begin:end] > 0
            decisions["copies"] = result.copies[begin:end]
            save_array(decisions_path(self.work, task), decisions)

    def _groups(self, offsets: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the numbers of documents that share a bucket: int64 [members]."""
        for path in sorted((self.work / "matches").glob("*.dups")):
            links = np.fromfile(path, "<u4").reshape(-1, 4).astype(np.int64)
            yield from chained_groups(np.stack([offsets[links[:, i]] + links[:, i + 1] for i in (0, 2)], axis=1))

    def _verified(self, pairs: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the pairs, [m, 2], that are similar enough, and their similarities, [m]."""
        hashes: dict[int, np.ndarray] = {}
        for number, values in self._documents(np.unique(pairs), offsets):
            hashes[number] = shingles(str(values["text"]), self.recipe.ngram)
        similarities = np.array([jaccard(hashes[a], hashes[b]) for a, b in pairs.tolist()])
        enough = similarities >= self.recipe.jaccard
        return pairs[enough], similarities[enough]

    def _documents(self, numbers: np.ndarray, offsets: np.ndarray) -> Iterator[tuple[int, dict[str, object]]]:
        """Yield (number, values) of documents; ``numbers``: [n], counted over all tasks."""
        for task, (begin, end) in enumerate(pairwise(offsets.tolist())):
            selected = set((numbers[(numbers >= begin) & (numbers < end)] - begin).tolist())
            documents = shelved(self.work, task) if selected else iter(())
            yield from ((begin + number, values) for number, values in documents if number in selected)

    def _report(
        self,
        rows: np.ndarray,
        result: KeptDocuments,
        first: np.ndarray,
        similarities: dict[tuple[int, int], float],
        offsets: np.ndarray,
    ) -> None:
        """Write the tally and ``duplicates.jsonl``."""
        tally = Tally()
        dropped = np.flatnonzero(result.copies == 0)
        documents = dict(self._documents(np.union1d(dropped, result.kept_by[dropped]), offsets))
        lines = []
        for number in dropped.tolist():
            kept, own = int(result.kept_by[number]), int(first[number])
            kind = "exact" if kept == own else "near"
            similarity = 1.0 if kept == own else similarities[min(kept, own), max(kept, own)]
            tally.add(self.sources[rows["source"][number]], kind, num_bytes=int(rows["length"][number]))
            details = {"kept": documents[kept]["id"], "jaccard": round(similarity, 3)}
            tally.example(kind, str(documents[number]["id"]), str(documents[number]["text"]), **details)
            lines.append(json.dumps({"dropped": documents[number]["id"], **details}))
        write_whole(self.work / "duplicates.jsonl", "".join(line + "\n" for line in lines))
        self._count_repeated_ids(rows, tally, offsets)
        tally.save(self.work / "tallies" / "decide-00000.json")

    def _count_repeated_ids(self, rows: np.ndarray, tally: Tally, offsets: np.ndarray) -> None:
        """Count documents with the id of another document. Raises ValueError if the recipe has ``on_bad = "fail"``."""
        order = np.argsort(rows["name"], kind="stable")
        repeated = order[1:][rows["name"][order][1:] == rows["name"][order][:-1]]
        for number, values in self._documents(repeated[:1], offsets):
            source = self.sources[rows["source"][number]]
            if self.recipe.on_bad == "fail":
                raise ValueError(f"source {source}: several documents have the id {values['id']!r}: make ids unique")
            tally.example("id again", str(values["id"]), str(values["text"]))
        for number in repeated.tolist():
            tally.add(self.sources[rows["source"][number]], "id again")
