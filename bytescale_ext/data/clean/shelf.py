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
from bytescale_ext.json_input import finite
from bytescale_ext.new_file import new_file

# A stored document: hash of its text in two halves, bytes of its text, number of its source, hash of its name.
ROW: Final = np.dtype([("high", "<u8"), ("low", "<u8"), ("length", "<u8"), ("source", "<u4"), ("name", "<u8")])
# Decision about a document: whether it stays, and the number of documents that it represents, including itself.
DECISION: Final = np.dtype([("kept", "?"), ("copies", "<u4")])


def shelf_path(work: Path, rank: int) -> Path:
    """Return the path of a task's documents."""
    return work / "shelf" / f"{rank:05d}.jsonl"


def rows_path(work: Path, rank: int) -> Path:
    """Return the path of a task's rows, which are in the order of its documents."""
    return work / "shelf" / f"{rank:05d}.npy"


def decisions_path(work: Path, rank: int) -> Path:
    """Return the path of the decisions about a task's documents."""
    return work / "decisions" / f"{rank:05d}.npy"


def hashes_of(text: str, size: int = 16) -> tuple[int, ...]:
    """Return the hash of a text as 64-bit numbers; ``size`` is the size of the hash in bytes."""
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=size).digest()
    return tuple(int.from_bytes(digest[start : start + 8], "little") for start in range(0, size, 8))


def save_array(path: Path, values: np.ndarray) -> None:
    """Write an array [n] to a temporary file, and rename it when it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with new_file(path, is_binary=True) as stream:
        np.save(stream, values)


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
        path, rows = shelf_path(self.work, rank), []
        path.parent.mkdir(parents=True, exist_ok=True)
        with new_file(path) as stream:
            for document in data:
                source = self.sources.index(str(document.metadata["source"]))
                keys = finite(document.metadata.get("keys", {}))
                values = {"text": document.text, "id": document.id, "source": source, "keys": keys}
                stream.write(json.dumps(values, default=str) + "\n")
                length = len(document.text.encode("utf-8", "surrogatepass"))
                rows.append((*hashes_of(composed(document.text)), length, source, *hashes_of(document.id, 8)))
                yield document
        save_array(rows_path(self.work, rank), np.array(rows, ROW))


def shelved(work: Path, rank: int) -> Iterator[tuple[int, dict[str, object]]]:
    """Yield (number, values) of each document of a task; values are the text, the id and the number of the source."""
    with shelf_path(work, rank).open(encoding="utf-8") as lines:
        for number, line in enumerate(lines):
            yield number, json.loads(line)


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
                metadata = {"source": source, "copies": copies, "keys": values["keys"]}
                yield Document(str(values["text"]), str(values["id"]), metadata=metadata)
