"""Arrays of Megatron's ``.idx`` files, mapped into memory.

Layout of an ``.idx`` file (Megatron's ``IndexedDatasetBuilder``, little endian)::

    offset   9 bytes  b"MMIDIDX\\0\\0"
             uint64   version, always 1
             uint8    code of the token type (8 = uint16, 4 = int32, ...)
             uint64   num_sequences
             uint64   num_documents + 1
    34       int32    [num_sequences]      tokens of each sequence
             int64    [num_sequences]      byte offset of each sequence in the .bin file
             int64    [num_documents + 1]  first sequence of each document, then num_sequences
             int8     [num_sequences]      modes, in multimodal files only; ignored

The ``.bin`` file contains the sequences without gaps, so the tokens of a document are contiguous.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from bytescale_ext.json_input import check_stored

REBUILD: Final = "write the data set again (bytescale corpus, or Megatron's tools/preprocess_data.py)"
"""Remedy for a damaged data set, for error messages."""

PART: Final = 1 << 20
"""Documents that are read at a time, so that a process holds few of them."""

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_TOKEN_TYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}


@dataclass(frozen=True, eq=False, slots=True)
class DocumentIndex:
    """The arrays of an ``.idx`` file, mapped into memory. Nothing is read before it is asked for.

    Attributes:
        path: path of the file.
        dtype: type of the stored tokens.
        sequence_lengths: tokens of each sequence, int32 [num_sequences].
        sequence_pointers: first byte of each sequence in the ``.bin`` file, int64 [num_sequences].
        document_indices: first sequence of each document, then num_sequences: int64 [num_documents + 1].
        identity: size and modification time of the file, in bytes and nanoseconds.
    """

    path: str
    dtype: np.dtype
    sequence_lengths: np.ndarray
    sequence_pointers: np.ndarray
    document_indices: np.ndarray
    identity: tuple[int, int]

    @property
    def num_documents(self) -> int:
        """Number of documents, including empty documents."""
        return len(self.document_indices) - 1

    def first_tokens(self, documents: np.ndarray) -> np.ndarray:
        """Return the first token of each of the documents [n] in the ``.bin`` file: int64 [n].

        For document ``num_documents`` it is the end of the file.
        """
        num_sequences = len(self.sequence_lengths)
        sequences = self.document_indices[documents]
        if not num_sequences:
            return np.zeros(len(sequences), dtype=np.int64)
        within = np.minimum(sequences, num_sequences - 1)
        tokens: np.ndarray = self.sequence_pointers[within] // self.dtype.itemsize
        tokens += np.where(sequences < num_sequences, 0, self.sequence_lengths[within])
        return tokens

    def part_lengths(self, begin: int, end: int) -> np.ndarray:
        """Return the tokens of the documents [begin, end): int64 [end - begin]."""
        if begin >= end:
            return np.zeros(0, dtype=np.int64)
        bounds = self.document_indices[begin : end + 1]
        lengths = self.sequence_lengths[bounds[0] : bounds[-1]]
        if len(lengths) == end - begin and bool((bounds[1:] - bounds[:-1] == 1).all()):
            return lengths.astype(np.int64)
        offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
        np.cumsum(lengths, dtype=np.int64, out=offsets[1:])
        return np.diff(offsets[bounds - bounds[0]])

    def check_part(self, begin: int, end: int) -> None:
        """Raise ValueError if the documents [begin, end) are out of order or have a negative length."""
        bounds = self.document_indices[begin : end + 1]
        num_sequences = len(self.sequence_lengths)
        if bool((bounds[1:] < bounds[:-1]).any()) or int(bounds[0]) < 0 or int(bounds[-1]) > num_sequences:
            raise ValueError(_out_of_order(self.path, self.document_indices, num_sequences))
        lengths = self.sequence_lengths[bounds[0] : bounds[-1]]
        if len(lengths) and int(lengths.min()) < 0:
            raise ValueError(f"{self.path}: a sequence has {int(lengths.min())} tokens: {REBUILD}")

    def check_pointers(self, begin: int, end: int) -> None:
        """Raise ValueError if the sequences of the documents [begin, end) leave gaps in the ``.bin`` file."""
        first, last = int(self.document_indices[begin]), int(self.document_indices[end])
        pointers = self.sequence_pointers[first : last + 1]  # with the first sequence of the next part, if any
        ends = pointers[: last - first] + self.sequence_lengths[first:last] * np.int64(self.dtype.itemsize)
        begins_late = first == 0 and len(pointers) > 0 and int(pointers[0]) != 0
        if begins_late or not np.array_equal(ends[: len(pointers) - 1], pointers[1:]):
            raise ValueError(f"{self.path}: the sequences are not contiguous in the .bin file: {REBUILD}")


def open_index(path: str | os.PathLike[str]) -> DocumentIndex:
    """Map an ``.idx`` file into memory, and check its header and its size. Reads no lengths.

    Args:
        path: path of the file, with or without the suffix ``.idx``.

    Raises:
        ValueError: the file is missing, truncated, or not an ``.idx`` file.
    """
    path = os.fspath(path).removesuffix(".idx") + ".idx"
    if not os.path.isfile(path):
        raise ValueError(f"{path}: no such file: give the path of a Megatron data set without .idx and .bin")
    try:
        check_stored(path)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}: copy the file again") from None
    with Path(path).open("rb") as stream:
        header = stream.read(_HEADER.size)
        stat = os.fstat(stream.fileno())
    if header[: len(_MAGIC)] != _MAGIC:
        raise ValueError(f"{path}: not an index file of Megatron (it starts with {header[:9]!r}): {REBUILD}")
    if stat.st_size < _HEADER.size:
        raise ValueError(f"{path}: cut short, {stat.st_size} bytes are shorter than the header: copy the file again")
    _, version, code, num_sequences, num_bounds = _HEADER.unpack(header)
    if version != 1:
        raise ValueError(f"{path}: index version {version}, only version 1 is supported: {REBUILD}")
    if code not in _TOKEN_TYPES:
        raise ValueError(f"{path}: token type {code} is not an integer type ({_TOKEN_TYPES}): {REBUILD}")
    needed = _HEADER.size + num_sequences * 12 + num_bounds * 8
    if stat.st_size < needed:
        raise ValueError(
            f"{path}: cut short, {stat.st_size} of {needed} bytes for {num_sequences} sequences: copy the file again"
        )
    raw = np.memmap(path, mode="r", dtype=np.uint8)
    pointers_at = _HEADER.size + num_sequences * 4
    bounds_at = pointers_at + num_sequences * 8
    bounds = raw[bounds_at:needed].view("<i8")
    if not len(bounds) or int(bounds[0]) != 0 or int(bounds[-1]) != num_sequences:
        raise ValueError(_out_of_order(path, bounds, num_sequences))
    return DocumentIndex(
        path=path,
        dtype=np.dtype(_TOKEN_TYPES[code]),
        # Plain arrays: slices of a memmap object cost microseconds each.
        sequence_lengths=np.asarray(raw[_HEADER.size : pointers_at].view("<i4")),
        sequence_pointers=np.asarray(raw[pointers_at:bounds_at].view("<i8")),
        document_indices=np.asarray(bounds),
        identity=(stat.st_size, stat.st_mtime_ns),
    )


def _out_of_order(path: str, bounds: np.ndarray, num_sequences: int) -> str:
    last = int(bounds[-1]) if len(bounds) else None
    return (
        f"{path}: the documents end at sequence {last} of {num_sequences} or are out of order "
        f"(each document needs end_document() before finalize()): {REBUILD}"
    )


def checked_parts(index: DocumentIndex) -> Iterator[tuple[int, int]]:
    """Yield the bounds of consecutive parts of the documents, checked one by one. Raises ValueError for damage."""
    for begin in range(0, index.num_documents, PART):
        end = min(begin + PART, index.num_documents)
        index.check_part(begin, end)
        yield begin, end
