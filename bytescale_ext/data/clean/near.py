"""Near-duplicates over all sources: MinHash signatures on datatrove, and the decision after a look at all shingles."""

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
    Kept,
    candidate_pairs,
    chained_groups,
    choose,
    equal_groups,
    order_of,
)
from bytescale_ext.data.clean.recipe import Recipe
from bytescale_ext.data.clean.shelf import DECISION, ROW, decisions_path, rows_path, save_array, shelved
from bytescale_ext.data.clean.tally import Tally, write_whole
from bytescale_ext.data.clean.words import RULES, jaccard, shingles

_BLOCK: Final = 512  # shingles that are permuted together: a long document takes no more memory than a short one
_ODD: Final = np.uint64(1)
_LARGEST: Final = np.uint64((1 << 64) - 1)


def minhash_config(recipe: Recipe) -> MinhashConfig:
    """Return datatrove's settings; hashes of 32 bits would collide in large corpora."""
    return MinhashConfig(
        n_grams=recipe.ngram,
        num_buckets=recipe.buckets,
        hashes_per_bucket=recipe.hashes,
        hash_config=HashConfig(precision=64, hash_fc="sha1"),
    )


class Signatures(MinhashDedupSignature):  # type: ignore[misc]  # datatrove has no types
    """datatrove's step with our shingles, whose number does not set the memory."""

    def __init__(self, recipe: Recipe, folder: Path) -> None:
        super().__init__(str(folder), config=minhash_config(recipe), language=RULES)

    def get_shingles(self, text: str) -> np.ndarray:
        """Return the hashes of the distinct runs of words, uint64 [n, 1]."""
        return shingles(text, self.config.n_grams).reshape(-1, 1)

    def get_signature(self, shingles: np.ndarray) -> list[list[int]]:
        """Return the least hash under each permutation, by bucket. ``shingles``: uint64 [n, 1].

        An odd factor and a summand permute the numbers of 64 bits, which wrap: faster than datatrove's prime.
        """
        a, b = self.parameters
        least = np.full(self.num_hashes, _LARGEST)
        room = np.empty((_BLOCK, self.num_hashes), np.uint64)
        for start in range(0, len(shingles), _BLOCK):
            block = shingles[start : start + _BLOCK]
            permuted = np.multiply(block, a | _ODD, out=room[: len(block)])
            permuted += b
            np.minimum(least, permuted.min(axis=0), out=least)
        return [bucket.tolist() for bucket in np.split(least, self.config.num_buckets)]


class Decide(PipelineStep):  # type: ignore[misc]  # datatrove has no types
    """Decide for all documents together which stay, in one task; near-duplicates are verified on all shingles."""

    name = "decide"
    type = "dedup"

    def __init__(self, recipe: Recipe, work: Path) -> None:
        super().__init__()
        self.recipe = recipe
        self.work = work
        self.sources = tuple(source.name for source in recipe.sources)

    def run(self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1) -> None:
        """Write the decisions of each task, the counts, and ``duplicates.jsonl``."""
        parts = [np.load(rows_path(self.work, task)) for task in range(self.recipe.tasks)]
        rows = np.concatenate([np.empty(0, ROW), *parts])
        offsets = np.cumsum([0, *map(len, parts)])
        first = equal_groups(rows) if "exact" in self.recipe.steps else np.arange(len(rows))
        rank_of = order_of(rows)
        pairs, similar = np.empty((0, 2), np.int64), np.empty(0)
        if "near" in self.recipe.steps:
            found = candidate_pairs(self._groups(offsets), first, rank_of)
            pairs, similar = self._verified(found, offsets)
        kept = choose(first, rank_of, pairs)
        self._tell(
            rows,
            kept,
            first,
            {(one, other): share for (one, other), share in zip(pairs.tolist(), similar.tolist(), strict=True)},
            offsets,
        )
        for task, (begin, end) in enumerate(pairwise(offsets.tolist())):
            decided = np.zeros(end - begin, DECISION)
            decided["kept"] = kept.copies[begin:end] > 0
            decided["copies"] = kept.copies[begin:end]
            save_array(decisions_path(self.work, task), decided)

    def _groups(self, offsets: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the numbers of the documents that share a bucket, int64 [members]."""
        for path in sorted((self.work / "matches").glob("*.dups")):
            links = np.fromfile(path, "<u4").reshape(-1, 4).astype(np.int64)
            yield from chained_groups(np.stack([offsets[links[:, i]] + links[:, i + 1] for i in (0, 2)], axis=1))

    def _verified(self, pairs: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the pairs [m, 2] of at least the least similarity, and their similarities [m]."""
        made: dict[int, np.ndarray] = {}
        for number, values in self._documents(np.unique(pairs), offsets):
            made[number] = shingles(str(values["text"]), self.recipe.ngram)
        similar = np.array([jaccard(made[one], made[other]) for one, other in pairs.tolist()])
        enough = similar >= self.recipe.jaccard
        return pairs[enough], similar[enough]

    def _documents(self, numbers: np.ndarray, offsets: np.ndarray) -> Iterator[tuple[int, dict[str, object]]]:
        """Yield documents by their numbers [n] over all tasks."""
        for task, (begin, end) in enumerate(pairwise(offsets.tolist())):
            wanted = set((numbers[(numbers >= begin) & (numbers < end)] - begin).tolist())
            found = shelved(self.work, task) if wanted else iter(())
            yield from ((begin + place, values) for place, values in found if place in wanted)

    def _tell(
        self,
        rows: np.ndarray,
        kept: Kept,
        first: np.ndarray,
        similar: dict[tuple[int, int], float],
        offsets: np.ndarray,
    ) -> None:
        tally = Tally()
        gone = np.flatnonzero(kept.copies == 0)
        names = dict(self._documents(np.union1d(gone, kept.kept_by[gone]), offsets))
        lines = []
        for one in gone.tolist():
            by, own = int(kept.kept_by[one]), int(first[one])
            what = "exact" if by == own else "near"
            share = 1.0 if by == own else similar[min(by, own), max(by, own)]
            tally.add(self.sources[rows["source"][one]], what, num_bytes=int(rows["length"][one]))
            told = {"kept": names[by]["id"], "jaccard": round(share, 3)}
            tally.example(what, str(names[one]["id"]), str(names[one]["text"]), **told)
            lines.append(json.dumps({"dropped": names[one]["id"], **told}))
        write_whole(self.work / "duplicates.jsonl", "".join(line + "\n" for line in lines))
        self._tell_ids(rows, tally, offsets)
        tally.save(self.work / "told" / "decide-00000.json")

    def _tell_ids(self, rows: np.ndarray, tally: Tally, offsets: np.ndarray) -> None:
        """Count documents whose id another one has. Raises ValueError where the recipe says so."""
        order = np.argsort(rows["name"], kind="stable")
        again = order[1:][rows["name"][order][1:] == rows["name"][order][:-1]]
        for number, values in self._documents(again[:1], offsets):
            where = self.sources[rows["source"][number]]
            if self.recipe.on_bad == "fail":
                raise ValueError(f"source {where}: several documents have the id {values['id']!r}: give each its own")
            tally.example("id again", str(values["id"]), str(values["text"]))
        for number in again.tolist():
            tally.add(self.sources[rows["source"][number]], "id again")
