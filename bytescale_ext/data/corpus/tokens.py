"""The tokens of a data set, document by document, and the text of those whose tokens are bytes. No Megatron."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from bytescale_ext.data.samples.lengths import SampleTable, check_indexed_dataset, read_idx_lengths
from bytescale_ext.data.samples.texts import BYTE_LEVEL_EOD

_BLOCK = 1 << 24  # tokens looked at together


@dataclass(frozen=True, eq=False, slots=True)
class CorpusTokens:
    """The token ids of a data set, on disk.

    Attributes:
        prefix: path without ``.idx`` and ``.bin``.
        tokens: [tokens] ids of all documents, end to end.
        lengths: int64 [documents] tokens of each document.
        offsets: int64 [documents + 1] first token of each document, then their number.
    """

    prefix: str
    tokens: np.ndarray
    lengths: np.ndarray
    offsets: np.ndarray

    @property
    def is_bytes(self) -> bool:
        """Whether tokens are bytes, with ``BYTE_LEVEL_EOD`` at the end of documents. Reads all of them."""
        starts = range(0, len(self.tokens), _BLOCK)
        return all(int(self.tokens[start : start + _BLOCK].max()) <= BYTE_LEVEL_EOD for start in starts)

    def read(self, document: int, start: int, length: int) -> np.ndarray:
        """Return token ids [length] of a document from ``start`` on."""
        first = int(self.offsets[document]) + start
        return self.tokens[first : first + length]

    def pieces(self, table: SampleTable) -> Iterator[np.ndarray]:
        """Yield the token ids [length] of each piece of a table."""
        for document, start, length in zip(table.document, table.start, table.length, strict=True):
            yield self.read(int(document), int(start), int(length))

    def texts(self, table: SampleTable) -> Iterator[str]:
        """Yield the text of each piece of a table, where tokens are bytes."""
        for ids in self.pieces(table):
            yield ids[ids < BYTE_LEVEL_EOD].astype(np.uint8).tobytes().decode("utf-8", errors="replace")


def open_tokens(prefix: str) -> CorpusTokens:
    """Return the tokens of a data set. Raises ValueError where a file is missing or damaged, or holds no tokens."""
    info = check_indexed_dataset(prefix)
    lengths = read_idx_lengths(prefix)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return CorpusTokens(info.prefix, np.memmap(info.prefix + ".bin", dtype=info.dtype, mode="r"), lengths, offsets)
