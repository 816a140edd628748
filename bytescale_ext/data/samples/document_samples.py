"""Samples of a large data set, found in its mapped index when they are asked for.

Most documents are one sample. So a data set lists only the other documents, which have no tokens or more tokens than a
sample. Rows count the first pieces of all documents that have tokens, followed by the further pieces of the long
documents::

    documents of 3, 0, 10 and 4 tokens, samples of at most 4:

    row        0    1    2    3    4
    document   0    2    3    2    2
    tokens     0-3  0-4  0-4  4-8  8-10

A table of all samples in file order (``SampleTable``) would take 20 bytes per sample in every process.
"""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bytescale_ext.data.samples.idx_file import PART, DocumentIndex, checked_parts, open_index
from bytescale_ext.data.samples.lengths import check_indexed_dataset
from bytescale_ext.data.samples.scan_files import scanned

_CHECKED = 3  # parts of a list that was read from a file


@dataclass(frozen=True, eq=False, slots=True)
class DocumentSamples:
    """Samples of one epoch of the documents [begin, end) of a data set. Document indices are relative to ``begin``.

    Attributes:
        index: arrays of the ``.idx`` file.
        has_single_sequences: whether each document is one sequence.
        seq_length: tokens of the longest sample.
        begin, end: the documents.
        num_empty_before: documents of the file without tokens before ``begin``.
        gaps: documents of the file with tokens before each document without tokens: int64 [num_empty].
        long: documents of several samples, counted from the file's first: int64 [num_long].
        before: number of further pieces of the file's long documents before each document in ``long``, then including
            the last: int64 [num_long + 1].
    """

    index: DocumentIndex
    has_single_sequences: bool
    seq_length: int
    begin: int
    end: int
    num_empty_before: int
    gaps: np.ndarray
    long: np.ndarray
    before: np.ndarray

    def __len__(self) -> int:
        return self.num_first + int(self.before[-1] - self.before[0])

    @property
    def num_empty(self) -> int:
        """Number of documents without tokens, which give no sample."""
        return len(self.gaps)

    @property
    def num_first(self) -> int:
        """Number of documents with tokens."""
        return self.end - self.begin - len(self.gaps)

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples."""
        first, end = self.index.first_tokens(np.array([self.begin, self.end]))
        return int(end - first)

    @property
    def mean_tokens_of_first(self) -> float:
        """Mean tokens of the documents with tokens, each cut after ``seq_length`` tokens."""
        long = document_lengths(self.index, self.long, self.has_single_sequences)
        return (self.num_tokens - int(long.sum()) + self.seq_length * len(long)) / self.num_first

    def part(self, begin: int, end: int) -> DocumentSamples:
        """Return the samples of the documents [begin, end) of a whole data set."""
        assert (self.begin, self.end) == (0, self.index.num_documents), f"{self.begin=} {self.end=}"
        ranks = range(len(self.gaps))
        empty = slice(*(bisect_left(ranks, place, key=lambda i: int(self.gaps[i]) + i) for place in (begin, end)))
        first, last = (int(place) for place in np.searchsorted(self.long, (begin, end)))
        return DocumentSamples(
            self.index,
            self.has_single_sequences,
            self.seq_length,
            begin,
            end,
            empty.start,
            self.gaps[empty],
            self.long[first:last],
            self.before[first : last + 1],
        )

    def place(self, row: int) -> tuple[int, int, int]:
        """Return (document, first token in the document, number of tokens) of a row."""
        document, start = row, 0
        if row >= self.num_first:
            piece = row - self.num_first + int(self.before[0])
            place = bisect_right(self.before, piece) - 1
            document = int(self.long[place]) - self.begin
            start = (piece - int(self.before[place]) + 1) * self.seq_length
        elif len(self.gaps):
            document += bisect_right(self.gaps, row + self.begin - self.num_empty_before)
        if self.has_single_sequences:
            length = int(self.index.sequence_lengths[document + self.begin])
        else:
            length = int(document_lengths(self.index, np.array([document + self.begin]), False)[0])
        return document, start, min(length - start, self.seq_length)

    def places(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (document, first token in the document) of rows [n], each int64 [n]."""
        documents, starts = rows.astype(np.int64), np.zeros(len(rows), dtype=np.int64)
        if len(self.gaps):
            documents += np.searchsorted(self.gaps, rows + (self.begin - self.num_empty_before), side="right")
        if len(self.long):
            later = np.flatnonzero(rows >= self.num_first)
            pieces = rows[later] + (self.before[0] - self.num_first)
            places = np.searchsorted(self.before, pieces, side="right") - 1
            documents[later] = self.long[places] - self.begin
            starts[later] = (pieces - self.before[places] + 1) * self.seq_length
        return documents, starts

    def lengths(self, rows: np.ndarray) -> np.ndarray:
        """Return the tokens of rows [n]: int64 [n]."""
        return self._lengths(*self.places(rows))

    def _lengths(self, documents: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """Return the tokens of the samples at these places, int64 [n]; both arguments: [n]."""
        lengths = document_lengths(self.index, documents + self.begin, self.has_single_sequences)
        lengths -= starts
        np.minimum(lengths, self.seq_length, out=lengths)
        return lengths


def document_lengths(index: DocumentIndex, documents: np.ndarray, has_single_sequences: bool) -> np.ndarray:
    """Return the tokens of documents [n]: int64 [n]."""
    if has_single_sequences:
        lengths: np.ndarray = index.sequence_lengths[documents].astype(np.int64)
        return lengths
    ends = index.first_tokens(documents + 1)
    ends -= index.first_tokens(documents)
    return ends


def open_samples(prefix: str | os.PathLike[str], seq_length: int, cache: Path | None = None) -> DocumentSamples:
    """Return the samples of all documents of a data set, whose index is scanned once for each ``seq_length``.

    Args:
        prefix: path of the data set.
        seq_length: tokens of the longest sample, at least 1.
        cache: see ``check_indexed_dataset``.

    Raises:
        ValueError: see ``check_indexed_dataset``.
    """
    info, index = check_indexed_dataset(prefix, cache), open_index(prefix)
    is_single = info.has_single_sequences

    def is_valid(values: np.ndarray) -> bool:
        return _is_valid(values, index, seq_length, is_single)

    values = scanned(index, f"samples-{seq_length}", cache, lambda: _scan(index, seq_length), is_valid)
    return DocumentSamples(index, is_single, seq_length, 0, index.num_documents, 0, *_split(values))


def _scan(index: DocumentIndex, seq_length: int) -> np.ndarray:
    """Return the numbers of empty and of long documents, and the arrays ``gaps``, ``long`` and ``before``: [n]."""
    empty, long, pieces = ([np.zeros(0, dtype=np.int64)] for _ in range(3))
    for begin, end in checked_parts(index):
        lengths = index.part_lengths(begin, end)
        empty.append(np.flatnonzero(lengths == 0) + begin)
        places = np.flatnonzero(lengths > seq_length)
        long.append(places + begin)
        pieces.append((lengths[places] - 1) // seq_length)
    gaps = np.concatenate(empty)
    gaps -= np.arange(len(gaps))
    before = np.concatenate([[0], *pieces])
    counts = [len(gaps), len(before) - 1]
    return np.concatenate([counts, gaps, *long, np.cumsum(before)], dtype=np.int64)


def _split(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return ``gaps``, ``long`` and ``before`` of the result of ``_scan``."""
    num_empty, num_long = (int(count) for count in values[:2])
    gaps, long, before = np.split(values[2:], [num_empty, num_empty + num_long])
    return gaps, long, before


def _is_valid(values: np.ndarray, index: DocumentIndex, seq_length: int, is_single: bool) -> bool:
    """Return whether an array that was read from a file can be the result of ``_scan``. A stranger may have written it.

    Listed documents are compared with the index: all of them in up to ``_CHECKED`` parts, else the first part, the
    last part and parts between them. Documents that are missing in the list are not found.
    """
    if len(values) < 3 or int(values[:2].min()) < 0 or len(values) != 3 + int(values[0]) + 2 * int(values[1]):
        return False
    gaps, long, before = _split(values)
    if int(before[0]) != 0:
        return False
    for begin in _checked_starts(len(gaps)):
        empty = gaps[begin : begin + PART] + np.arange(begin, min(begin + PART, len(gaps)))
        if not _ascends(empty, index.num_documents) or document_lengths(index, empty, is_single).any():
            return False
    for begin in _checked_starts(len(long)):
        part = long[begin : begin + PART]
        if not _ascends(part, index.num_documents):
            return False
        pieces = (document_lengths(index, part, is_single) - 1) // seq_length
        if (pieces < 1).any() or not np.array_equal(np.diff(before[begin : begin + len(part) + 1]), pieces):
            return False
    return True


def _checked_starts(count: int) -> list[int]:
    """Return the first element of each part of a list that is compared, with at most ``_CHECKED`` parts."""
    num_parts = -(-count // PART)
    parts = np.unique(np.linspace(0, num_parts - 1, min(num_parts, _CHECKED)).astype(np.int64))
    return [int(part) * PART for part in parts]


def _ascends(documents: np.ndarray, end: int) -> bool:
    """Return whether documents [n] are below ``end`` and in ascending order."""
    is_within = int(documents[0]) >= 0 and int(documents[-1]) < end
    return is_within and bool((documents[1:] > documents[:-1]).all())
