"""Where the documents of a JSONL file lie, and how many samples each will give, without tokenizing most of them.

A text of n bytes makes at most n tokens and a few marks in any usual tokenizer, so a short text is one sample whatever
its length in tokens turns out to be. Only texts that may be longer than a sample are tokenized here, to be counted.
With that the order of all samples is known before training: the order that ``bytescale corpus`` and the local loader
give the same file. Empty texts and blank lines are no documents, as there.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from bytescale_ext.data.texts import Encode, json_text

# Marks that a tokenizer may add to a text: begin, end, end of document and the like.
MARK_TOKENS = 8
CHUNK_BYTES = 32 << 20
_FORMAT = 1


@dataclass(frozen=True, eq=False, slots=True)
class LineIndex:
    """The documents of a file, in its order: one entry for each line that has a text.

    Attributes:
        offsets: first byte of the line in the file, int64 [num_documents].
        num_bytes: bytes of the line, int64 [num_documents].
        tokens: tokens of the document, its end token included, where ``is_counted``; else the most it can have.
        is_counted: the text was tokenized: bool [num_documents].
    """

    offsets: np.ndarray
    num_bytes: np.ndarray
    tokens: np.ndarray
    is_counted: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets)

    @property
    def table_lengths(self) -> np.ndarray:
        """Lengths that cut into as many samples as the true ones: 1 where a document is one sample anyway."""
        return np.where(self.is_counted, self.tokens, 1)


def join_indices(parts: Sequence[LineIndex]) -> LineIndex:
    """The index of a file out of those of its chunks, in order."""
    columns = ([getattr(part, field.name) for part in parts] for field in fields(LineIndex))
    return LineIndex(*(np.concatenate(column) for column in columns))


def chunks(path: str, chunk_bytes: int = CHUNK_BYTES) -> list[tuple[int, int]]:
    """Byte ranges of a file that can be indexed apart; each line belongs to the range that it begins in."""
    size = os.path.getsize(path)
    return [(start, min(start + chunk_bytes, size)) for start in range(0, max(size, 1), chunk_bytes)]


def index_lines(path: str, start: int, stop: int, key: str, longest: int, encode: Encode) -> LineIndex:
    """The documents whose lines begin in bytes [start, stop) of a file; every line is parsed.

    Args:
        path: the file.
        start, stop: see ``chunks``.
        key: key of the text in each line.
        longest: tokens of the longest sample; what may be longer is tokenized.
        encode: text to tokens.

    Raises:
        ValueError: a line is bad (file and line are named), or the file cannot be read.
    """
    rows: list[tuple[int, int, int, bool]] = []
    try:
        with open(path, "rb") as stream:
            offset = 0
            if start:  # to the first line that begins at ``start`` or later
                stream.seek(start - 1)
                offset = start - 1 + len(stream.readline())
            while offset < stop and (line := stream.readline()):
                text = text_of_line(path, offset, line, key)
                if text:
                    most = len(text) + MARK_TOKENS
                    is_counted = most > longest
                    tokens = len(encode_text(path, offset, text, encode)) if is_counted else most
                    rows.append((offset, len(line), tokens, is_counted))
                offset += len(line)
    except OSError as error:
        raise ValueError(
            f"{path}: cannot read ({error.strerror}); every machine must have it under this path"
        ) from error
    columns = np.array(rows, dtype=np.int64).reshape(-1, 4).T.copy()
    return LineIndex(offsets=columns[0], num_bytes=columns[1], tokens=columns[2], is_counted=columns[3] != 0)


def text_of_line(path: str, offset: int, line: bytes, key: str) -> bytes:
    """The text of the line that begins at byte ``offset``. Raises ValueError, naming the line, for a bad one."""
    try:
        return json_text(line, key, path)
    except ValueError:
        return json_text(line, key, f"{path}:{_line_number(path, offset)}")


def encode_text(path: str, offset: int, text: bytes, encode: Encode) -> np.ndarray:
    """The tokens of a text. Raises ValueError, naming the line, where the tokenizer fails."""
    try:
        return encode(text)[0]
    except Exception as error:
        where = f"{path}:{_line_number(path, offset)}"
        raise ValueError(f"{where}: the tokenizer failed ({type(error).__name__}: {error})") from error


def unreadable(path: str, error: OSError) -> ValueError:
    """The error for a file that cannot be opened where a server runs."""
    return ValueError(f"{path}: cannot read ({error.strerror}); every machine must have it under this path")


def _line_number(path: str, offset: int) -> int:
    """Number, from 1, of the line that begins at byte ``offset``: counted only when a message needs it."""
    number = 1
    with open(path, "rb") as stream:
        while offset > 0 and (block := stream.read(min(offset, CHUNK_BYTES))):
            number += block.count(b"\n")
            offset -= len(block)
    return number


def index_file(folder: str, path: str, key: str, longest: int, tokenizer: str) -> Path:
    """The file in ``folder`` that keeps the index of ``path``: another one when anything that it depends on differs."""
    stat = os.stat(path)
    parts = (_FORMAT, os.path.abspath(path), stat.st_size, stat.st_mtime_ns, key, longest, tokenizer)
    return Path(folder) / f"{hashlib.sha256(repr(parts).encode()).hexdigest()[:32]}-lines.npz"


def load_index(file: Path) -> LineIndex | None:
    """A kept index; None where there is none, or an unreadable one."""
    try:
        with np.load(file) as kept:
            return LineIndex(*(kept[field.name] for field in fields(LineIndex)))
    except (OSError, ValueError, KeyError, EOFError, BadZipFile):
        return None


def save_index(file: Path, index: LineIndex) -> None:
    """Keep an index. Written under another name first, so a killed run leaves no half file.

    Raises:
        ValueError: the folder cannot be written.
    """
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as stream:
            np.savez(stream, **{field.name: getattr(index, field.name) for field in fields(LineIndex)})
        os.replace(partial, file)
    except OSError as error:
        raise ValueError(f"--data-cache-path {file.parent} cannot be written ({error.strerror})") from error
