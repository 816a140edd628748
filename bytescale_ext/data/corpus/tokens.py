"""Tokens of a data set by document, and the text of documents whose tokens are bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from bytescale_ext.data.samples.idx_file import DocumentIndex, open_index
from bytescale_ext.data.samples.lengths import SampleTable, check_indexed_dataset, read_idx_lengths, sample_table
from bytescale_ext.data.samples.texts import BYTE_LEVEL_EOD

_BLOCK = 1 << 24  # tokens read together


@dataclass(frozen=True, eq=False, slots=True)
class CorpusTokens:
    """Token ids of a data set on disk.

    Attributes:
        prefix: path without ``.idx`` and ``.bin``.
        tokens: token ids of all documents, end to end, [tokens].
        lengths: tokens of each document, int64 [documents].
        offsets: first token of each document, followed by the number of tokens, int64 [documents + 1].
    """

    prefix: str
    tokens: np.ndarray
    lengths: np.ndarray
    offsets: np.ndarray

    @property
    def is_bytes(self) -> bool:
        """Whether tokens are bytes, with ``BYTE_LEVEL_EOD`` at the end of documents. Reads all tokens."""
        starts = range(0, len(self.tokens), _BLOCK)
        return all(int(self.tokens[start : start + _BLOCK].max()) <= BYTE_LEVEL_EOD for start in starts)

    def read(self, document: int, start: int, length: int) -> np.ndarray:
        """Return the token ids, [length], of a document from ``start`` on."""
        first = int(self.offsets[document]) + start
        return self.tokens[first : first + length]

    def pieces(self, table: SampleTable) -> Iterator[np.ndarray]:
        """Yield the token ids, [length], of each piece of a table."""
        for document, start, length in zip(table.document, table.start, table.length, strict=True):
            yield self.read(int(document), int(start), int(length))

    def texts(self, table: SampleTable) -> Iterator[str]:
        """Yield the text of each piece of a table. Requires that tokens are bytes."""
        for ids in self.pieces(table):
            yield text_of(ids)


@dataclass(frozen=True, eq=False, slots=True)
class MappedTokens:
    """Token ids of a data set, mapped into memory; opening it reads no tokens and no lengths.

    Attributes:
        index: arrays of the ``.idx`` file.
        tokens: token ids of all documents, end to end, [tokens].
    """

    index: DocumentIndex
    tokens: np.ndarray

    def table(self, documents: np.ndarray, context: int) -> SampleTable:
        """Return the pieces of documents [n], ascending, split every ``context`` tokens."""
        first = self.index.first_tokens(documents)
        table = sample_table(self.index.first_tokens(documents + 1) - first, context)
        return SampleTable(documents[table.document], table.start, table.length, table.num_empty)

    def pieces(self, table: SampleTable) -> Iterator[np.ndarray]:
        """Yield the token ids, [length], of each piece of a table."""
        begins = self.index.first_tokens(table.document) + table.start
        for begin, length in zip(begins.tolist(), table.length.tolist(), strict=True):
            yield self.tokens[begin : begin + length]


def map_tokens(prefix: str) -> MappedTokens:
    """Map the tokens of a checked data set into memory."""
    index = open_index(prefix)
    return MappedTokens(index, np.memmap(index.path.removesuffix(".idx") + ".bin", dtype=index.dtype, mode="r"))


def text_of(ids: np.ndarray) -> str:
    """Return the text of tokens [n] that are bytes."""
    return ids[ids < BYTE_LEVEL_EOD].astype(np.uint8).tobytes().decode("utf-8", errors="replace")


def open_tokens(prefix: str) -> CorpusTokens:
    """Open the tokens of a data set. Raises ValueError if a file is missing or damaged, or there are no tokens."""
    info = check_indexed_dataset(prefix)
    lengths = read_idx_lengths(prefix)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return CorpusTokens(info.prefix, np.memmap(info.prefix + ".bin", dtype=info.dtype, mode="r"), lengths, offsets)
