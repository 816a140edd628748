"""JSONL files for tests, and their samples in the local loader."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bytescale_ext.data.samples.epochs import EpochOrder
from bytescale_ext.data.samples.lengths import sample_table
from bytescale_ext.data.samples.texts import encoder

SEED = 1234


def write_text(path: Path, num_lines: int, seed: int = 0, longest: int = 300) -> Path:
    """Return lines of random letters, some of two bytes, with blank lines and empty texts in between."""
    generator = np.random.default_rng(seed)
    with path.open("w") as stream:
        for number in range(num_lines):
            length = min(int(generator.lognormal(3.5, 1.2)), longest)
            text = "".join(generator.choice(list("abcdeéü \n"), length))
            stream.write(
                "\n" if number % 17 == 3 else json.dumps({"id": "", "text": text if number % 11 else ""}) + "\n"
            )
    return path


class LocalText:
    """Source of a ``StepLoader``: all samples of a text file in training order, with one token per byte."""

    def __init__(
        self, path: Path, seq_length: int, num_epochs: int = 1, first: int = 0, stop: int | None = None
    ) -> None:
        texts = [json.loads(line)["text"] for line in path.read_text().split("\n") if line.strip()]
        self.documents = [encoder(None)(text.encode())[0] for text in texts if text][first:stop]
        self.first, self.path = first, path
        self.table = sample_table(np.array([len(document) for document in self.documents]), seq_length)
        self.order = EpochOrder(len(self.table), SEED, 0)
        self.num_epochs = num_epochs

    def __len__(self) -> int:
        return self.num_epochs * len(self.table)

    def length(self, sample_id: int) -> int:
        return int(self.table.length[self.order.row(sample_id)])

    def read(self, sample_id: int, start: int, stop: int) -> np.ndarray:
        row = self.order.row(sample_id)
        begin = int(self.table.start[row])
        return self.documents[int(self.table.document[row])][begin + start : begin + stop].astype(np.int64)

    def describe(self, sample_id: int) -> str:
        row = self.order.row(sample_id)
        start = int(self.table.start[row])
        document = self.first + int(self.table.document[row])
        return f"{self.path}: document {document} tokens {start}-{start + self.length(sample_id)}"


def lengths_of(documents: Sequence[np.ndarray]) -> list[int]:
    """Return the tokens of each document."""
    return [len(document) for document in documents]
