"""Documents and decisions that tasks exchange through the work folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
from datatrove.data import Document, DocumentsPipeline
from datatrove.pipeline.base import PipelineStep

from bytescale_ext.data.clean.words import composed
from bytescale_ext.data.tasks.runs import mapped, save_array, sorted_by
from bytescale_ext.json_input import finite
from bytescale_ext.new_file import new_file

# A stored document: hash of its text in two halves, bytes of its text, number of its source, hash of its name, and the
# place of its line in the file of its task.
ROW: Final = np.dtype(
    [("high", "<u8"), ("low", "<u8"), ("length", "<u8"), ("source", "<u4"), ("name", "<u8"), ("place", "<u8")]
)
# Documents of a task in the order of their texts, and in the order of their names: hashes, and number in the task.
BY_TEXT: Final = np.dtype([("high", "<u8"), ("low", "<u8"), ("name", "<u8"), ("number", "<u8")])
BY_NAME: Final = np.dtype([("name", "<u8"), ("source", "<u4"), ("number", "<u8")])
# Decision about a document: whether it stays, and the number of documents that it represents, including itself.
DECISION: Final = np.dtype([("kept", "?"), ("copies", "<u4")])


def shelf_path(work: Path, rank: int) -> Path:
    """Return the path of a task's documents."""
    return work / "shelf" / f"{rank:05d}.jsonl"


def rows_path(work: Path, rank: int) -> Path:
    """Return the path of a task's rows, which are in the order of its documents."""
    return work / "shelf" / f"{rank:05d}.npy"


def by_text_path(work: Path, rank: int) -> Path:
    """Return the path of a task's run ``BY_TEXT``."""
    return work / "shelf" / f"{rank:05d}.text.npy"


def by_name_path(work: Path, rank: int) -> Path:
    """Return the path of a task's run ``BY_NAME``."""
    return work / "shelf" / f"{rank:05d}.name.npy"


def offsets_of(work: Path, tasks: int) -> np.ndarray:
    """Return the number of each task's first document over all tasks, followed by their sum: int64 [tasks + 1]."""
    counts = [len(mapped(rows_path(work, task))) for task in range(tasks)]
    return np.cumsum([0, *counts], dtype=np.int64)


def decisions_path(work: Path, rank: int) -> Path:
    """Return the path of the decisions about a task's documents."""
    return work / "decisions" / f"{rank:05d}.npy"


def hashes_of(text: str, size: int = 16) -> tuple[int, ...]:
    """Return the hash of a text as 64-bit numbers; ``size`` is the size of the hash in bytes."""
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=size).digest()
    return tuple(int.from_bytes(digest[start : start + 8], "little") for start in range(0, size, 8))


class Shelve(PipelineStep):  # type: ignore[misc]  # datatrove has no types
    """Writes documents and their rows to the work folder, and passes the documents on."""

    name = "shelve"
    type = "writer"

    def __init__(self, sources: tuple[str, ...], work: Path) -> None:
        super().__init__()
        self.sources = sources
        self.work = work

    def run(self, data: DocumentsPipeline, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Yield the documents. A killed task leaves only temporary files."""
        path, rows, place = shelf_path(self.work, rank), [], 0
        path.parent.mkdir(parents=True, exist_ok=True)
        with new_file(path) as stream:
            for document in data:
                source = self.sources.index(str(document.metadata["source"]))
                keys = finite(document.metadata.get("keys", {}))
                shard = document.metadata["shard"]
                values = {"text": document.text, "id": document.id, "source": source, "keys": keys, "shard": shard}
                line = json.dumps(values, default=str) + "\n"  # in ASCII
                stream.write(line)
                length = len(document.text.encode("utf-8", "surrogatepass"))
                rows.append((*hashes_of(composed(document.text)), length, source, *hashes_of(document.id, 8), place))
                place += len(line)
                yield document
        self.save(np.array(rows, ROW), rank)

    def save(self, rows: np.ndarray, rank: int) -> None:
        """Write the rows, [n] of type ``ROW``, of a task, and its runs by text and by name."""
        number = np.arange(len(rows))
        for path, dtype in ((by_text_path(self.work, rank), BY_TEXT), (by_name_path(self.work, rank), BY_NAME)):
            run = np.empty(len(rows), dtype)
            for name in dtype.names or ():
                run[name] = number if name == "number" else rows[name]
            save_array(path, sorted_by(run, dtype.names or ()))
        save_array(rows_path(self.work, rank), rows)


def shelved(work: Path, rank: int) -> Iterator[tuple[int, dict[str, object]]]:
    """Yield (number, values) of each document of a task: text, id, number of the source, keys and shard."""
    with shelf_path(work, rank).open(encoding="utf-8") as lines:
        for number, line in enumerate(lines):
            yield number, json.loads(line)


class StoredDocuments:
    """Reads stored documents of any task by their numbers over all tasks.

    Attributes:
        offsets: number of the first document of each task, from ``offsets_of``; int64 [tasks + 1].
    """

    def __init__(self, work: Path, tasks: int) -> None:
        self.offsets = offsets_of(work, tasks)
        self._rows = [mapped(rows_path(work, task)) for task in range(tasks)]
        self._work = work

    def rows(self, numbers: np.ndarray) -> np.ndarray:
        """Return the rows, [n] of type ``ROW``, of documents ``numbers`` [n]."""
        task = np.searchsorted(self.offsets, numbers, side="right") - 1
        rows = np.empty(len(numbers), ROW)
        for each in np.unique(task).tolist():
            chosen = task == each
            rows[chosen] = self._rows[each][numbers[chosen] - self.offsets[each]]
        return rows

    def read(self, number: int) -> dict[str, object]:
        """Return the values of a document, as in ``shelved``."""
        task = int(np.searchsorted(self.offsets, number, side="right")) - 1
        with shelf_path(self._work, task).open("rb") as lines:
            lines.seek(int(self._rows[task]["place"][number - self.offsets[task]]))
            values: dict[str, object] = json.loads(lines.readline())
        return values


class Survivors(PipelineStep):  # type: ignore[misc]  # datatrove has no types
    """Yields the documents of a task that stay, with the number of documents that each represents."""

    name = "survivors"
    type = "reader"

    def __init__(self, sources: tuple[str, ...], work: Path) -> None:
        super().__init__()
        self.sources = sources
        self.work = work

    def run(self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Read the stored documents of task ``rank``."""
        decisions = np.load(decisions_path(self.work, rank), allow_pickle=False)
        for number, values in shelved(self.work, rank):
            if decisions["kept"][number]:
                copies = int(decisions["copies"][number])
                source = self.sources[int(str(values["source"]))]
                metadata = {"source": source, "copies": copies, "keys": values["keys"], "shard": values["shard"]}
                yield Document(str(values["text"]), str(values["id"]), metadata=metadata)
