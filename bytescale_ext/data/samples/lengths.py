"""Document lengths of Megatron's ``.idx`` files, read without tokens, and the samples that documents are split into.

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
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_TOKEN_TYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
_SCAN_TOKENS = 1 << 22
_NUM_SAMPLED_BLOCKS = 4096
_REBUILD = "write the data set again (bytescale corpus, or Megatron's tools/preprocess_data.py)"


@dataclass(frozen=True, slots=True)
class IndexedInfo:
    """Sizes of a data set.

    Attributes:
        prefix: path without ``.idx`` and ``.bin``.
        num_documents: number of documents, including empty documents.
        num_empty: number of documents without tokens.
        num_tokens: tokens of all documents.
        max_tokens: tokens of the longest document.
        dtype: type of the stored tokens.
    """

    prefix: str
    num_documents: int
    num_empty: int
    num_tokens: int
    max_tokens: int
    dtype: np.dtype


@dataclass(frozen=True, eq=False, slots=True)
class SampleTable:
    """Samples of one epoch in file order. A sample is a document or a piece of a document.

    Attributes:
        document: document of each sample, int32 or int64 [num_samples].
        start: first token of each sample in its document, int64 [num_samples].
        length: tokens of each sample, at least 1, int64 [num_samples].
        num_empty: number of documents without tokens, which give no sample.
    """

    document: np.ndarray
    start: np.ndarray
    length: np.ndarray
    num_empty: int

    def __len__(self) -> int:
        return len(self.document)


@dataclass(frozen=True, eq=False, slots=True)
class _Index:
    dtype: np.dtype
    sequence_lengths: np.ndarray
    sequence_pointers: np.ndarray
    document_indices: np.ndarray

    def document_offsets(self) -> np.ndarray:
        """Return the first token of each document, followed by the number of tokens: int64 [num_documents + 1]."""
        ends = np.zeros(len(self.sequence_lengths) + 1, dtype=np.int64)
        np.cumsum(self.sequence_lengths, dtype=np.int64, out=ends[1:])
        offsets: np.ndarray = ends[self.document_indices]
        return offsets


def read_idx_lengths(path: str | os.PathLike[str]) -> np.ndarray:
    """Return the length of each document of an ``.idx`` file in tokens: int64 [num_documents].

    Args:
        path: path of the file, with or without the suffix ``.idx``.

    Raises:
        ValueError: the file is missing, damaged, or not an ``.idx`` file.
    """
    lengths: np.ndarray = np.diff(_read_index(_prefix_of(path)).document_offsets())
    return lengths


def check_indexed_dataset(prefix: str | os.PathLike[str]) -> IndexedInfo:
    """Check that the two files of a data set are complete and match, and return the sizes of the data set.

    Reads the ``.idx`` file and the size of the ``.bin`` file, but no tokens.

    Raises:
        ValueError: a file is missing, truncated, in another format or does not match the other file; or the data set
            has no tokens.
    """
    name = _prefix_of(prefix)
    index = _read_index(name)
    if not os.path.isfile(name + ".bin"):
        raise ValueError(f"{name}.bin: no such file, but {name}.idx is there: copy both files of the data set")
    offsets = index.document_offsets()
    num_tokens = int(offsets[-1])
    if num_tokens == 0:
        raise ValueError(f"{name}: the data set holds no tokens: {_REBUILD}")
    expected_bytes, file_bytes = num_tokens * index.dtype.itemsize, os.path.getsize(name + ".bin")
    if expected_bytes != file_bytes:
        raise ValueError(
            f"{name}.bin: {file_bytes} bytes, but {name}.idx lists {num_tokens} tokens of {index.dtype} "
            f"({expected_bytes} bytes): copy both files from one data set"
        )
    starts = np.cumsum(index.sequence_lengths, dtype=np.int64) - index.sequence_lengths
    if not np.array_equal(starts * index.dtype.itemsize, index.sequence_pointers):
        raise ValueError(f"{name}.idx: the sequences are not contiguous in the .bin file: {_REBUILD}")
    lengths = np.diff(offsets)
    return IndexedInfo(
        prefix=name,
        num_documents=len(lengths),
        num_empty=int(np.count_nonzero(lengths == 0)),
        num_tokens=num_tokens,
        max_tokens=int(lengths.max()),
        dtype=index.dtype,
    )


def check_token_ids(prefix: str | os.PathLike[str], vocab_size: int, limit_tokens: int = 268_435_456) -> int:
    """Check that token ids are in [0, vocab_size), and return the number of tokens read. One rank can check for all.

    A data set of up to ``limit_tokens`` is read completely. From a larger data set, blocks of equal size at equal
    distances are read, including the first and the last token. Nothing is read if the token type has no invalid ids.

    Raises:
        ValueError: an id is invalid (the message names the document, the token and the id), or the files are damaged
            (``check_indexed_dataset``).
    """
    info = check_indexed_dataset(prefix)
    limits = np.iinfo(info.dtype)
    if limits.min >= 0 and limits.max < vocab_size:
        return 0
    tokens = np.memmap(info.prefix + ".bin", dtype=info.dtype, mode="r")
    if info.num_tokens <= limit_tokens:
        block_tokens = _SCAN_TOKENS
        starts = np.arange(0, info.num_tokens, block_tokens)
    else:
        num_blocks = min(_NUM_SAMPLED_BLOCKS, limit_tokens)
        block_tokens = limit_tokens // num_blocks
        starts = np.linspace(0, info.num_tokens - block_tokens, num_blocks).astype(np.int64)
    num_scanned = 0
    for start in starts.tolist():
        block = tokens[start : start + block_tokens]
        num_scanned += len(block)
        if int(block.max()) >= vocab_size or int(block.min()) < 0:
            bad = int(np.argmax((block >= vocab_size) | (block < 0)))
            raise ValueError(_bad_token(info.prefix, start + bad, int(block[bad]), vocab_size))
    return num_scanned


def sample_table(document_lengths: np.ndarray, seq_length: int) -> SampleTable:
    """Split documents of the lengths [num_documents] into samples, so that each token is in exactly one sample.

    Documents are never joined. A document of n tokens gives ``ceil(n / seq_length)`` samples, and the last sample may
    be shorter than ``seq_length``.

    Raises:
        ValueError: ``seq_length`` is below 1, or a length is negative.
    """
    if seq_length < 1:
        raise ValueError(f"seq_length {seq_length}: a sample needs at least one token, give --seq-length 1 or more")
    lengths = np.asarray(document_lengths, dtype=np.int64)
    if lengths.size and int(lengths.min()) < 0:
        bad = int(lengths.argmin())
        raise ValueError(f"document {bad} has {int(lengths[bad])} tokens: {_REBUILD}")
    pieces = -(-lengths // seq_length)
    small = len(lengths) <= np.iinfo(np.int32).max
    document = np.repeat(np.arange(len(lengths), dtype=np.int32 if small else np.int64), pieces)
    start = (np.arange(len(document)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * seq_length
    length = np.minimum(lengths[document] - start, seq_length)
    return SampleTable(document, start, length, num_empty=int(np.count_nonzero(lengths == 0)))


def _prefix_of(path: str | os.PathLike[str]) -> str:
    return os.fspath(path).removesuffix(".idx")


def _bad_token(prefix: str, position: int, token: int, vocab_size: int) -> str:
    offsets = _read_index(prefix).document_offsets()
    document = int(np.searchsorted(offsets, position, side="right")) - 1
    return (
        f"{prefix}: document {document} holds the token id {token} (its token {position - int(offsets[document])}), "
        f"outside the vocabulary of {vocab_size}: train with the tokenizer that wrote the data set, "
        "or give its vocabulary with --vocab-size"
    )


def _read_index(prefix: str) -> _Index:
    """Return the arrays of ``prefix``.idx as views of a memory map of the file."""
    path = prefix + ".idx"
    if not os.path.isfile(path):
        raise ValueError(f"{path}: no such file: give the path of a Megatron data set without .idx and .bin")
    with Path(path).open("rb") as stream:
        header = stream.read(_HEADER.size)
    if header[: len(_MAGIC)] != _MAGIC:
        raise ValueError(f"{path}: not an index file of Megatron (it starts with {header[:9]!r}): {_REBUILD}")
    size = os.path.getsize(path)
    if size < _HEADER.size:
        raise ValueError(f"{path}: cut short, {size} bytes are shorter than the header: copy the file again")
    _, version, code, num_sequences, num_bounds = _HEADER.unpack(header)
    if version != 1:
        raise ValueError(f"{path}: index version {version}, only version 1 is supported: {_REBUILD}")
    if code not in _TOKEN_TYPES:
        raise ValueError(f"{path}: token type {code} is not an integer type ({_TOKEN_TYPES}): {_REBUILD}")
    needed = _HEADER.size + num_sequences * 12 + num_bounds * 8
    if size < needed:
        raise ValueError(
            f"{path}: cut short, {size} of {needed} bytes for {num_sequences} sequences: copy the file again"
        )
    raw = np.memmap(path, mode="r", dtype=np.uint8)
    pointers_at = _HEADER.size + num_sequences * 4
    bounds_at = pointers_at + num_sequences * 8
    index = _Index(
        dtype=np.dtype(_TOKEN_TYPES[code]),
        sequence_lengths=raw[_HEADER.size : pointers_at].view("<i4"),
        sequence_pointers=raw[pointers_at:bounds_at].view("<i8"),
        document_indices=raw[bounds_at:needed].view("<i8"),
    )
    _check_documents(path, index)
    return index


def _check_documents(path: str, index: _Index) -> None:
    bounds, num_sequences = index.document_indices, len(index.sequence_lengths)
    if num_sequences and int(index.sequence_lengths.min()) < 0:
        raise ValueError(f"{path}: a sequence has {int(index.sequence_lengths.min())} tokens: {_REBUILD}")
    ordered = len(bounds) > 0 and int(bounds[0]) == 0 and bool((bounds[1:] >= bounds[:-1]).all())
    if not ordered or int(bounds[-1]) != num_sequences:
        last = int(bounds[-1]) if len(bounds) else None
        raise ValueError(
            f"{path}: the documents end at sequence {last} of {num_sequences} or are out of order "
            f"(each document needs end_document() before finalize()): {_REBUILD}"
        )
