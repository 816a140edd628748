"""Document lengths of Megatron's data sets, read without tokens, and the samples that documents are split into."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bytescale_ext.data.samples.idx_file import REBUILD, DocumentIndex, checked_parts, open_index
from bytescale_ext.data.samples.scan_files import scanned

_SCAN_TOKENS = 1 << 22
_NUM_SAMPLED_BLOCKS = 4096
_NUM_SIZES = 4


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
        has_single_sequences: whether each document is one sequence.
    """

    prefix: str
    num_documents: int
    num_empty: int
    num_tokens: int
    max_tokens: int
    dtype: np.dtype
    has_single_sequences: bool


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

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples."""
        return int(self.length.sum())

    def place(self, row: int) -> tuple[int, int, int]:
        """Return (document, first token in the document, number of tokens) of a row."""
        return int(self.document[row]), int(self.start[row]), int(self.length[row])

    def lengths(self, rows: np.ndarray) -> np.ndarray:
        """Return the tokens of rows [n]: int64 [n]."""
        lengths: np.ndarray = self.length[rows]
        return lengths


def read_idx_lengths(path: str | os.PathLike[str]) -> np.ndarray:
    """Return the length of each document of an ``.idx`` file in tokens: int64 [num_documents].

    Args:
        path: path of the file, with or without the suffix ``.idx``.

    Raises:
        ValueError: the file is missing, damaged, or not an ``.idx`` file.
    """
    index = open_index(path)
    lengths = np.empty(index.num_documents, dtype=np.int64)
    for begin, end in checked_parts(index):
        lengths[begin:end] = index.part_lengths(begin, end)
    return lengths


def check_indexed_dataset(prefix: str | os.PathLike[str], cache: Path | None = None) -> IndexedInfo:
    """Check that the two files of a data set are complete and match, and return the sizes of the data set.

    Reads the ``.idx`` file and the size of the ``.bin`` file, but no tokens. An ``.idx`` file that was read before is
    not read again (``scanned``).

    Args:
        prefix: path of the data set.
        cache: folder of the index cache; None: the folder ``cache`` below the path of the data set.

    Raises:
        ValueError: a file is missing, truncated, in another format or does not match the other file; or the data set
            has no tokens.
    """
    name = _prefix_of(prefix)
    index = open_index(name)
    if not os.path.isfile(name + ".bin"):
        raise ValueError(f"{name}.bin: no such file, but {name}.idx is there: copy both files of the data set")
    values = scanned(index, "documents", cache, lambda: _sizes(index), lambda values: len(values) == _NUM_SIZES)
    num_empty, num_tokens, max_tokens, num_single = values.tolist()
    if num_tokens == 0:
        raise ValueError(f"{name}: the data set holds no tokens: {REBUILD}")
    expected_bytes, file_bytes = num_tokens * index.dtype.itemsize, os.path.getsize(name + ".bin")
    if expected_bytes != file_bytes:
        raise ValueError(
            f"{name}.bin: {file_bytes} bytes, but {name}.idx lists {num_tokens} tokens of {index.dtype} "
            f"({expected_bytes} bytes): copy both files from one data set"
        )
    return IndexedInfo(
        prefix=name,
        num_documents=index.num_documents,
        num_empty=num_empty,
        num_tokens=num_tokens,
        max_tokens=max_tokens,
        dtype=index.dtype,
        has_single_sequences=num_single == index.num_documents,
    )


def _sizes(index: DocumentIndex) -> np.ndarray:
    """Return documents without tokens, tokens, tokens of the longest document, and documents of one sequence: [4]."""
    num_empty = num_tokens = max_tokens = num_single = 0
    for begin, end in checked_parts(index):
        index.check_pointers(begin, end)
        lengths, bounds = index.part_lengths(begin, end), index.document_indices[begin : end + 1]
        num_empty += int(np.count_nonzero(lengths == 0))
        num_tokens += int(lengths.sum())
        max_tokens = max(max_tokens, int(lengths.max()))
        num_single += int(np.count_nonzero(bounds[1:] - bounds[:-1] == 1))
    return np.array([num_empty, num_tokens, max_tokens, num_single], dtype=np.int64)


def check_token_ids(
    prefix: str | os.PathLike[str], vocab_size: int, limit_tokens: int = 268_435_456, cache: Path | None = None
) -> int:
    """Check that token ids are in [0, vocab_size), and return the number of tokens read. One rank can check for all.

    A data set of up to ``limit_tokens`` is read completely. From a larger data set, blocks of equal size at equal
    distances are read, including the first and the last token. Nothing is read if the token type has no invalid ids.

    Raises:
        ValueError: an id is invalid (the message names the document, the token and the id), or the files are damaged
            (``check_indexed_dataset``).
    """
    info = check_indexed_dataset(prefix, cache)
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
            raise ValueError(_bad_token(open_index(info.prefix), start + bad, int(block[bad]), vocab_size))
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
        raise ValueError(f"document {bad} has {int(lengths[bad])} tokens: {REBUILD}")
    pieces = -(-lengths // seq_length)
    small = len(lengths) <= np.iinfo(np.int32).max
    document = np.repeat(np.arange(len(lengths), dtype=np.int32 if small else np.int64), pieces)
    start = (np.arange(len(document)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * seq_length
    length = np.minimum(lengths[document] - start, seq_length)
    return SampleTable(document, start, length, num_empty=int(np.count_nonzero(lengths == 0)))


def _prefix_of(path: str | os.PathLike[str]) -> str:
    return os.fspath(path).removesuffix(".idx")


def _bad_token(index: DocumentIndex, position: int, token: int, vocab_size: int) -> str:
    sequence = int(np.searchsorted(index.sequence_pointers, position * index.dtype.itemsize, side="right")) - 1
    document = int(np.searchsorted(index.document_indices, sequence, side="right")) - 1
    first = int(index.first_tokens(np.array([document]))[0])
    return (
        f"{_prefix_of(index.path)}: document {document} holds the token id {token} (its token {position - first}), "
        f"outside the vocabulary of {vocab_size}: train with the tokenizer that wrote the data set, "
        "or give its vocabulary with --vocab-size"
    )
