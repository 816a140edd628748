"""Records of files: JSON of any kind and rows of Parquet, each as one line of JSON, from packed files too.

The name of a file tells its kind (``.jsonl``, ``.ndjson``, ``.json``, ``.parquet``, each also packed). The content
decides where the name is silent, and whether a ``.json`` file holds documents. Lines end at newlines alone.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final, Literal, cast

from bytescale_ext.json_input import finite, json_value

Kind = Literal["text", "lines", "values", "parquet", "warc"]
DAMAGED: Final = (OSError, EOFError, lzma.LZMAError, zlib.error)
"""Errors of files that cannot be read or unpacked."""
_MAGIC: Final = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bz2", b"\xfd7zXZ\x00": "xz"}
_PACKED: Final = (".gz", ".zst", ".zstd", ".bz2", ".xz")
_LINES: Final = (".jsonl", ".ndjson")
_HEAD: Final = 1 << 16  # bytes that tell a kind
_BATCH: Final = 256  # rows of Parquet that are read together
_BLANK: Final = b" \t\r\n\xef\xbb\xbf"


def packing_of(path: Path) -> str:
    """Return the compression of a file by its first bytes, "" without compression."""
    with path.open("rb") as stream:
        head = stream.read(6)
    return next((name for magic, name in _MAGIC.items() if head.startswith(magic)), "")


def opened(path: Path) -> BinaryIO:
    """Open a file for its unpacked bytes. Raises OSError, and ValueError if a package is missing."""
    packing = packing_of(path)
    if packing == "zstd":
        try:
            import pyarrow
        except ImportError:
            raise ValueError(f"{path}: zstd needs pyarrow: pip install pyarrow") from None
        return cast(BinaryIO, io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd")))
    if packing:
        module = {"gzip": gzip, "bz2": bz2, "xz": lzma}[packing]
        return cast(BinaryIO, module.open(path, "rb"))
    return path.open("rb")


def kind_of(path: Path, key: str) -> Kind:
    """Return the kind of a file. Raises an error of ``DAMAGED`` or ValueError if it cannot be unpacked.

    A ``.json`` file, or a file whose name says nothing, holds records if its first value is an object with ``key``.
    """
    name = path.name
    while name.endswith(_PACKED):
        name = name[: name.rindex(".")]
    with opened(path) as stream:
        head = stream.read(_HEAD)
    if head.startswith(b"PAR1"):
        return "parquet"
    if head.startswith(b"WARC/"):
        return "warc"
    if name.endswith(_LINES):
        return "lines"
    if name.endswith(".parquet"):
        return "parquet"
    if (name.endswith(".json") or "." not in name.lstrip(".")) and begins_like_json(head):
        return _kind_of_json(path, head, key)
    return "text"


def has_mark(path: Path) -> bool:
    """Return whether a file begins with the byte order mark of UTF-8, which is no part of its first line."""
    with path.open("rb") as stream:
        return stream.read(3) == b"\xef\xbb\xbf"


def begins_like_json(head: bytes) -> bool:
    """Return whether the first bytes of a file begin an object or a list of JSON."""
    return head.lstrip(_BLANK)[:1] in (b"{", b"[")


def _kind_of_json(path: Path, head: bytes, key: str) -> Kind:
    """Return whether a file is lines of objects, other values of JSON, or text."""
    first = head.lstrip(_BLANK).partition(b"\n")[0]
    try:
        value = json_value(first)
    except ValueError:
        value = None
    if isinstance(value, dict):
        return "lines" if key in value else "text"
    record = next(_values(path), b"")
    try:
        value = json_value(record)
    except ValueError:
        return "text"
    return "values" if isinstance(value, dict) and key in value else "text"


def records(path: Path, kind: Kind) -> Iterator[bytes]:
    """Yield each record of a file as a line of JSON, blank lines included; damaged records are yielded as they are.

    Raises an error of ``DAMAGED`` or ValueError if the file cannot be read any further.
    """
    if kind == "parquet":
        yield from _rows(path)
    elif kind == "values":
        yield from _values(path)
    else:
        with opened(path) as stream:
            for number, line in enumerate(stream):
                yield line.removeprefix(b"\xef\xbb\xbf") if number == 0 else line


def _values(path: Path) -> Iterator[bytes]:
    """Yield the values of a file of JSON: the elements of a list, or values one after the other."""
    with opened(path) as stream:
        text = stream.read().decode("utf-8-sig", errors="surrogateescape")
    decoder, place = json.JSONDecoder(), 0
    while text[place:].strip() if len(text) - place < _HEAD else True:
        place += len(text[place : place + _HEAD]) - len(text[place : place + _HEAD].lstrip())
        try:
            value, place = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            yield text[place:].encode("utf-8", errors="surrogateescape")
            return
        for element in value if isinstance(value, list) else (value,):
            yield json.dumps(element, ensure_ascii=True).encode()


def _rows(path: Path) -> Iterator[bytes]:
    """Yield the rows of a Parquet file. Raises ValueError for another file."""
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise ValueError(f"{path}: Parquet needs pyarrow: pip install pyarrow") from None
    try:
        with ParquetFile(path) as table:
            for batch in table.iter_batches(_BATCH):
                for row in batch.to_pylist():
                    yield json.dumps(finite(row), default=str).encode()
    except ArrowException as error:
        raise ValueError(f"{path}: not a Parquet file ({error})") from error
