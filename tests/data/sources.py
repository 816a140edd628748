"""Data sets for tests: ``.idx`` files written byte by byte, and a source in memory that records its reads."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

CODES = {"uint8": 1, "int32": 4, "int64": 5, "uint16": 8}


def write_data_set(prefix: Path, documents: Sequence[Sequence[Sequence[int]]], dtype: str = "uint16") -> str:
    """Write documents, each a list of sequences of token ids. Returns the prefix."""
    sequences = [sequence for document in documents for sequence in document]
    lengths = np.array([len(sequence) for sequence in sequences], dtype="<i4")
    pointers = (np.cumsum(lengths, dtype="<i8") - lengths) * np.dtype(dtype).itemsize
    bounds = np.cumsum([0, *(len(document) for document in documents)], dtype="<i8")
    header = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, CODES[dtype], len(sequences), len(bounds))
    index = header + lengths.tobytes() + pointers.astype("<i8").tobytes() + bounds.tobytes()
    Path(f"{prefix}.idx").write_bytes(index)
    Path(f"{prefix}.bin").write_bytes(b"".join(np.array(s, dtype=dtype).tobytes() for s in sequences))
    return str(prefix)


class MemorySource:
    """Documents in memory with samples like ``sample_table(lengths, seq_length)``."""

    def __init__(self, document_lengths: Sequence[int], seq_length: int = 1 << 30) -> None:
        self.documents = []
        first = 1
        for length in document_lengths:
            self.documents.append(np.arange(first, first + length, dtype=np.int64))
            first += length
        self.pieces = [
            (document, start, min(seq_length, length - start))
            for document, length in enumerate(document_lengths)
            for start in range(0, length, seq_length)
        ]
        self.reads: list[tuple[int, int, int]] = []

    def __len__(self) -> int:
        return len(self.pieces)

    def length(self, sample_id: int) -> int:
        return self.pieces[sample_id][2]

    def read(self, sample_id: int, start: int, stop: int) -> np.ndarray:
        document, first, length = self.pieces[sample_id]
        assert 0 <= start <= stop <= length + 1
        self.reads.append((sample_id, start, stop))
        return self.documents[document][first + start : first + stop].copy()

    def describe(self, sample_id: int) -> str:
        document, first, length = self.pieces[sample_id]
        return f"memory: document {document} tokens {first}-{first + length}"
