"""Decisions about the documents of a task, and the list of its duplicates."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from datatrove.data import DocumentsPipeline
from datatrove.pipeline.base import PipelineStep

from bytescale_ext.data.clean.equal import COPIES, DROPPED, copies_paths, dropped_paths
from bytescale_ext.data.clean.near import NEAR, values_at
from bytescale_ext.data.clean.recipe import Recipe
from bytescale_ext.data.clean.shelf import DECISION, StoredDocuments, decisions_path
from bytescale_ext.data.clean.tally import Tally, write_whole
from bytescale_ext.data.tasks.runs import joined, mapped, rows_between, save_array


class Settle(PipelineStep):  # type: ignore[misc]  # datatrove has no types
    """Writes the decisions about the documents of a task, its tally, and its part of ``duplicates.jsonl``."""

    name = "settle"
    type = "dedup"

    def __init__(self, recipe: Recipe, work: Path) -> None:
        super().__init__()
        self.recipe = recipe
        self.work = work

    def run(self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1) -> None:
        """Decide about the documents of task ``rank``."""
        documents = StoredDocuments(self.work, world_size)
        begin, end = documents.offsets[rank : rank + 2].tolist()
        numbers = np.arange(begin, end, dtype=np.uint64)
        equal = joined(rows_between(dropped_paths(self.work, world_size), "number", begin, end), DROPPED)
        copies = joined(rows_between(copies_paths(self.work, world_size), "number", begin, end), COPIES)
        counts = values_at(copies, "number", "copies", numbers, 1)
        first = numbers.copy()  # document with an equal text that stays, unless it is a near-duplicate
        first[(equal["number"] - np.uint64(begin)).astype(np.int64)] = equal["kept"]
        kept, similarity = self._kept(first)
        gained = joined(rows_between(sorted((self.work / "near" / "better").glob("*.npy")), "better", begin, end), NEAR)
        np.add.at(counts, (gained["better"] - np.uint64(begin)).astype(np.int64), gained["copies"].astype(np.int64))
        decisions = np.zeros(len(numbers), DECISION)
        decisions["kept"] = kept == numbers
        decisions["copies"] = np.where(decisions["kept"], counts, 0)
        self._report(documents, rank, np.stack([numbers, first, kept], axis=1), similarity)
        save_array(decisions_path(self.work, rank), decisions)

    def _kept(self, first: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the documents that stay for documents ``first`` [n], uint64 [n], and their similarity, float64 [n]."""
        kept, similarity = first.copy(), np.ones(len(first))
        for path in sorted((self.work / "near" / "worse").glob("*.npy")):
            near = mapped(path)
            if len(near):
                dropped = np.array(near["worse"])
                places = np.minimum(np.searchsorted(dropped, first), len(near) - 1)
                is_near = dropped[places] == first
                kept[is_near], similarity[is_near] = near["better"][places[is_near]], near["jaccard"][places[is_near]]
        return kept, similarity

    def _report(self, documents: StoredDocuments, rank: int, chains: np.ndarray, similarity: np.ndarray) -> None:
        """Write the tally and the list of duplicates.

        Args:
            documents: stored documents.
            rank: number of the task.
            chains: each document, the document with an equal text, and the document that stays: uint64 [n, 3].
            similarity: similarity of the last two, float64 [n].
        """
        tally, lines = Tally(), []
        dropped = np.flatnonzero(chains[:, 2] != chains[:, 0])
        lengths = documents.rows(chains[dropped, 0].astype(np.int64))["length"]
        for place, num_bytes in zip(dropped.tolist(), lengths.tolist(), strict=True):
            number, first, kept = chains[place].tolist()
            values = documents.read(number)
            kind = "exact" if kept == first else "near"
            source = self.recipe.sources[int(str(values["source"]))].name
            details = {"kept": documents.read(kept)["id"], "jaccard": round(float(similarity[place]), 3)}
            tally.add(source, kind, num_bytes=num_bytes)
            tally.example(kind, str(values["id"]), str(values["text"]), **details)
            lines.append(json.dumps({"dropped": values["id"], **details}))
        write_whole(duplicates_path(self.work, rank), "".join(line + "\n" for line in lines))
        tally.save(self.work / "tallies" / f"settle-{rank:05d}.json")


def duplicates_path(work: Path, task: int) -> Path:
    """Return the path of a task's part of ``duplicates.jsonl``."""
    return work / "duplicates" / f"{task:05d}.jsonl"
