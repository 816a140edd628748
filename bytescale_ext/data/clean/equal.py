"""Equal texts and repeated ids over all tasks. Each task compares the documents whose hashes are in its range."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
from datatrove.data import DocumentsPipeline
from datatrove.pipeline.base import PipelineStep

from bytescale_ext.data.clean.recipe import Recipe
from bytescale_ext.data.clean.shelf import BY_NAME, BY_TEXT, StoredDocuments, by_name_path, by_text_path, offsets_of
from bytescale_ext.data.clean.tally import EXAMPLES, Tally
from bytescale_ext.data.tasks.runs import hash_range, joined, rows_between, save_array, sorted_by

# A dropped document and the equal document that stays; a document that stays and its number of equal documents. Both
# are numbers over all tasks, and runs are sorted by the first.
DROPPED: Final = np.dtype([("number", "<u8"), ("kept", "<u8")])
COPIES: Final = np.dtype([("number", "<u8"), ("copies", "<u8")])


def dropped_paths(work: Path, tasks: int) -> list[Path]:
    """Return the paths of the runs ``DROPPED``."""
    return [work / "equal" / f"{task:05d}.dropped.npy" for task in range(tasks)]


def copies_paths(work: Path, tasks: int) -> list[Path]:
    """Return the paths of the runs ``COPIES``, which have no documents without equal documents."""
    return [work / "equal" / f"{task:05d}.copies.npy" for task in range(tasks)]


def equal_texts(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the dropped and the kept among documents with equal texts: ``DROPPED`` [n] and ``COPIES`` [m].

    Of equal texts, the document with the smallest hash of its name stays. ``rows``: ``BY_TEXT`` [documents].
    """
    rows = sorted_by(rows, ("high", "low", "name", "number"))
    begins = np.append(True, (rows["high"][1:] != rows["high"][:-1]) | (rows["low"][1:] != rows["low"][:-1]))
    first = np.flatnonzero(begins[: len(rows)])
    counts = np.diff(np.append(first, len(rows)))
    dropped = np.empty(len(rows) - len(first), DROPPED)
    dropped["number"] = np.delete(rows["number"], first)
    dropped["kept"] = np.repeat(rows["number"][first], counts - 1)
    copies = np.empty(int(np.count_nonzero(counts > 1)), COPIES)
    copies["number"], copies["copies"] = rows["number"][first][counts > 1], counts[counts > 1]
    return np.sort(dropped), np.sort(copies)


class FindEqual(PipelineStep):  # type: ignore[misc]  # datatrove has no types
    """Finds equal texts and repeated ids."""

    name = "equal"
    type = "dedup"

    def __init__(self, recipe: Recipe, work: Path) -> None:
        super().__init__()
        self.recipe = recipe
        self.work = work

    def run(self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1) -> None:
        """Write the runs and the tally of a range of hashes."""
        texts = self._rows([by_text_path(self.work, task) for task in range(world_size)], "high", BY_TEXT, rank)
        if "exact" not in self.recipe.steps:
            texts = texts[:0]
        dropped, copies = equal_texts(texts)
        save_array(dropped_paths(self.work, world_size)[rank], dropped)
        save_array(copies_paths(self.work, world_size)[rank], copies)
        self._count_repeated_ids(rank, world_size)

    def _rows(self, paths: list[Path], field: str, dtype: np.dtype, rank: int) -> np.ndarray:
        """Return the rows, [n], of a range of hashes, with numbers over all tasks."""
        parts = rows_between(paths, field, *hash_range(rank, len(paths)))
        for part, offset in zip(parts, offsets_of(self.work, len(paths)).tolist(), strict=False):
            part["number"] += np.uint64(offset)
        return joined(parts, dtype)

    def _count_repeated_ids(self, rank: int, tasks: int) -> None:
        """Count documents with the id of another document. Raises ValueError if the recipe has ``on_bad = "fail"``."""
        rows = self._rows([by_name_path(self.work, task) for task in range(tasks)], "name", BY_NAME, rank)
        rows = sorted_by(rows, ("name", "number"))
        repeated = rows[1:][rows["name"][1:] == rows["name"][:-1]]
        tally, documents = Tally(), StoredDocuments(self.work, tasks)
        for number in repeated["number"][:EXAMPLES].tolist():
            values = documents.read(number)
            source = self.recipe.sources[int(str(values["source"]))].name
            if self.recipe.on_bad == "fail":
                raise ValueError(f"source {source}: several documents have the id {values['id']!r}: make ids unique")
            tally.example("id again", str(values["id"]), str(values["text"]))
        for source_number, count in zip(*np.unique(repeated["source"], return_counts=True), strict=True):
            tally.add(self.recipe.sources[source_number].name, "id again", int(count))
        tally.save(self.work / "tallies" / f"equal-{rank:05d}.json")
