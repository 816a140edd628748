"""Index of the documents of a file of JSON lines and of their numbers of samples. Packed files are unpacked first.

Only long documents are tokenized for the index. With any common tokenizer, a text of n bytes gives at most n tokens
plus a few special tokens, so a short text is one sample. Only a text that may be longer than a sample is tokenized. So
the order of all samples is known before training, and it equals the order of ``bytescale corpus`` and the local loader,
which also skip empty texts and blank lines.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from bytescale_ext.data.samples.records import DAMAGED, column_flaw, kind_of, packing_of, write_records
from bytescale_ext.data.samples.texts import Encode, json_text
from bytescale_ext.json_input import check_stored
from bytescale_ext.new_file import new_file

# Limit of the special tokens that a tokenizer adds to a text, such as begin, end and end of document.
MARK_TOKENS = 8
CHUNK_BYTES = 32 << 20
_FORMAT = 1


@dataclass(frozen=True, eq=False, slots=True)
class LineIndex:
    """Documents of a file in its order, one per line with a text.

    Attributes:
        offsets: first byte of each line in the file, int64 [num_documents].
        num_bytes: bytes of each line, int64 [num_documents].
        tokens: tokens of each document, including its end token, if ``is_counted``; else an upper bound; int64
            [num_documents].
        is_counted: whether the text was tokenized, bool [num_documents].
    """

    offsets: np.ndarray
    num_bytes: np.ndarray
    tokens: np.ndarray
    is_counted: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets)

    @property
    def table_lengths(self) -> np.ndarray:
        """Lengths for ``sample_table``: the length of counted documents, else 1 (a single sample); [num_documents]."""
        return np.where(self.is_counted, self.tokens, 1)


def join_indices(parts: Sequence[LineIndex]) -> LineIndex:
    """Join the indices of the chunks of a file, in order."""
    columns = ([getattr(part, field.name) for part in parts] for field in fields(LineIndex))
    return LineIndex(*(np.concatenate(column) for column in columns))


def chunks(path: str, chunk_bytes: int = CHUNK_BYTES) -> list[tuple[int, int]]:
    """Return byte ranges of a file that are indexed separately. A line belongs to the range of its first byte."""
    size = os.path.getsize(path)
    return [(start, min(start + chunk_bytes, size)) for start in range(0, max(size, 1), chunk_bytes)]


def index_lines(path: str, start: int, stop: int, key: str, longest: int, encode: Encode) -> LineIndex:
    """Return the index of the documents whose lines start in bytes [start, stop) of a file. Parses every line.

    Args:
        path: path of the file.
        start: first byte, see ``chunks``.
        stop: end of the byte range.
        key: key of the text in each line.
        longest: tokens of the longest sample; a text that may be longer is tokenized.
        encode: function from text to tokens.

    Raises:
        ValueError: a line is invalid (the message names it), or the file cannot be read.
    """
    rows: list[tuple[int, int, int, bool]] = []
    try:
        with open(path, "rb") as stream:
            offset = 0
            if start:  # skip to the first line that starts at ``start`` or later
                stream.seek(start - 1)
                offset = start - 1 + len(stream.readline())
            while offset < stop and (line := stream.readline()):
                text = text_of_line(path, offset, line, key)
                if text:
                    bound = len(text) + MARK_TOKENS
                    is_counted = bound > longest
                    tokens = len(encode_text(path, offset, text, encode)) if is_counted else bound
                    rows.append((offset, len(line), tokens, is_counted))
                offset += len(line)
    except OSError as error:
        raise unreadable(path, error) from error
    columns = np.array(rows, dtype=np.int64).reshape(-1, 4).T.copy()
    return LineIndex(offsets=columns[0], num_bytes=columns[1], tokens=columns[2], is_counted=columns[3] != 0)


def text_of_line(path: str, offset: int, line: bytes, key: str) -> bytes:
    """Return the text of the line at byte ``offset``. Raises ValueError, which names the line, if it is invalid."""
    try:
        return json_text(line, key, path)
    except ValueError:
        return json_text(line, key, f"{path}:{_line_number(path, offset)}")


def encode_text(path: str, offset: int, text: bytes, encode: Encode) -> np.ndarray:
    """Return the tokens of a text: [n]. Raises ValueError, which names the line, if the tokenizer fails."""
    try:
        return encode(text)[0]
    except Exception as error:
        where = f"{path}:{_line_number(path, offset)}"
        raise ValueError(f"{where}: the tokenizer failed ({type(error).__name__}: {error})") from error


def unreadable(path: str, error: OSError) -> ValueError:
    """Return the error for a file that a server cannot open."""
    return ValueError(f"{path}: cannot read ({error.strerror}); every machine must have it under this path")


def _line_number(path: str, offset: int) -> int:
    """Return the number of the line at byte ``offset``, counted from 1. Reads the file, so only for messages."""
    number = 1
    with open(path, "rb") as stream:
        while offset > 0 and (block := stream.read(min(offset, CHUNK_BYTES))):
            number += block.count(b"\n")
            offset -= len(block)
    return number


def index_file(folder: str, path: str, key: str, longest: int, tokenizer: str) -> Path:
    """Return the cache file of an index in ``folder``. Its name is a hash of everything that the index depends on."""
    return Path(folder) / f"{_digest(path, key, longest, tokenizer)}-lines.npz"


def _digest(path: str | Path, *settings: str | int) -> str:
    """Return a hash of a file's path, size and modification time, and of settings."""
    stat = os.stat(path)
    parts = (_FORMAT, os.path.abspath(path), stat.st_size, stat.st_mtime_ns, *settings)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def is_plain(path: Path, key: str) -> bool:
    """Return whether a file has lines of JSON that can be read at any offset.

    Raises ValueError if it holds no documents, or cannot be read.
    """
    try:
        kind = kind_of(path, key)
        if kind in ("text", "warc"):
            raise ValueError(
                f"{path}: --hdp-loader ray reads files of JSON and Parquet with documents under the key {key!r}; use "
                "--hdp-loader local for Megatron's data sets"
            )
        if kind == "parquet" and (flaw := column_flaw(path, key)):
            raise ValueError(f"{path}: {flaw}: change --hdp-json-key")
        return kind == "lines" and not packing_of(path)
    except DAMAGED as error:
        raise ValueError(f"{path}: cannot read ({error}): change the data path") from error


def unpacked(folder: str, path: Path, key: str) -> tuple[Path, int]:
    """Return a file in ``folder`` with the records of a file as plain lines, and the number of records left out.

    The file is written once. Records of more than ``MOST_BYTES`` become blank lines, which hold no document.

    Raises:
        ValueError: a file cannot be read or written.
    """
    file = Path(folder) / f"{_digest(path, key)}-{path.name[:100]}.jsonl"
    if file.exists():
        return file, 0
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with new_file(file, is_binary=True) as stream:
            left_out = write_records(stream, folder, path, kind_of(path, key))
    except DAMAGED as error:
        raise ValueError(f"{path}: cannot be unpacked to --data-cache-path {folder} ({error})") from error
    return file, left_out


def load_index(file: Path) -> LineIndex | None:
    """Return a cached index, or None if it is missing or unreadable."""
    try:
        check_stored(file)
        with np.load(file, allow_pickle=False) as columns:
            return LineIndex(*(columns[field.name] for field in fields(LineIndex)))
    except (OSError, ValueError, KeyError, EOFError, BadZipFile):
        return None


def save_index(file: Path, index: LineIndex) -> None:
    """Write an index to a temporary file and rename it, so that a killed run leaves no partial index.

    Raises:
        ValueError: the folder is not writable.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with new_file(file, is_binary=True) as stream:
            np.savez(stream, **{field.name: getattr(index, field.name) for field in fields(LineIndex)})
    except OSError as error:
        raise ValueError(f"--data-cache-path {file.parent} cannot be written ({error.strerror})") from error
