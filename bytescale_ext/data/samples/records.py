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
import re
import shutil
import zlib
from collections.abc import Buffer, Iterator
from pathlib import Path
from types import ModuleType
from typing import IO, TYPE_CHECKING, BinaryIO, Final, Literal, cast

from bytescale_ext.data.samples.parquet_pages import MOST_RATIO, MOST_ROWS, ColumnPages, check_pages
from bytescale_ext.errors import one_line
from bytescale_ext.json_input import check_stored, finite, json_value

if TYPE_CHECKING:
    from pyarrow import Array
    from pyarrow.parquet import ParquetFile

Kind = Literal["text", "lines", "values", "parquet", "warc"]
DAMAGED: Final = (OSError, EOFError, lzma.LZMAError, zlib.error)
"""Errors of files that cannot be read or unpacked."""
MOST_BYTES: Final = 128 << 20
"""Longest record that is read: a small compressed file can hold one of any length."""
MOST_UNPACKED: Final = 4 << 30
"""Bytes to which a packed file of any size may unpack; a larger file may unpack to ``MOST_RATIO`` times its bytes."""
MIN_FREE_BYTES: Final = 1 << 30
"""Free bytes that unpacked records leave on the disk of their file."""
_CHECKED_BYTES: Final = 256 << 20  # written between two looks at the free space
_MAGIC: Final = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bz2", b"\xfd7zXZ\x00": "xz"}
_OTHERS: Final = {
    b"PK\x03\x04": "a ZIP archive", b"7z\xbc\xaf\x27\x1c": "a 7z archive", b"Rar!\x1a": "a RAR archive",
    b"\x04\x22\x4d\x18": "an lz4 file", b"\x1f\x9d": "a file of compress", b"ARROW1": "an Arrow file",
    b"Obj\x01": "an Avro file", b"SQLite format 3\0": "an SQLite database", b"%PDF-": "a PDF file",
}  # fmt: skip
"""First bytes of formats that are not read."""
_OBJECT: Final = re.compile(rb'(?:\xef\xbb\xbf)?[\s\[]*\{\s*"[^"\n]*"\s*:')
_PACKED: Final = (".gz", ".zst", ".zstd", ".bz2", ".xz")
_LINES: Final = (".jsonl", ".ndjson")
_MOST_WINDOW: Final = 160 << 20  # memory to unpack an .xz file; zstd refuses windows above 128 MiB itself
_HEAD: Final = 1 << 16  # bytes that tell a kind
_BATCH: Final = 256  # rows of Parquet that are read together
_SHORT: Final = 64  # bytes of a value that may be in lists of any length
_BATCH_BYTES: Final = 512 << 20  # to which rows that are read together may unpack
_BLANK: Final = b" \t\r\n\xef\xbb\xbf"
_BETWEEN: Final = {False: re.compile(r"[ \t\r\n]*"), True: re.compile(r"[ \t\r\n]*(?:,[ \t\r\n]*)?")}
"""What stands between values, outside and inside a list."""


def packing_of(path: Path) -> str:
    """Return the compression of a file by its first bytes, "" without compression."""
    check_stored(path)
    with path.open("rb") as stream:
        head = stream.read(6)
    return next((name for magic, name in _MAGIC.items() if head.startswith(magic)), "")


class _Bounded(io.RawIOBase):
    """Unpacked bytes of a file, up to the most that a file of its size may unpack to."""

    def __init__(self, path: Path, stream: BinaryIO) -> None:
        self._path, self._stream = path, stream
        self._left = most_unpacked(path)

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Buffer) -> int:
        """Read into a buffer; return the number of bytes. Raises ValueError after too many bytes."""
        view = memoryview(buffer).cast("B")
        data = self._stream.read(len(view))
        self._left -= len(data)
        if self._left < 0:
            raise ValueError(unpacks_to_too_much(self._path))
        view[: len(data)] = data
        return len(data)

    def close(self) -> None:
        """Close the file."""
        self._stream.close()
        super().close()


class _Unxz(io.RawIOBase):
    """Unpacked bytes of an ``.xz`` file. Python's own reader takes the memory that the file asks for, up to 4 GiB."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self._decoder = stream, lzma.LZMADecompressor(memlimit=_MOST_WINDOW)

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Buffer) -> int:
        """Read into a buffer; return the number of bytes. Raises LZMAError and EOFError for damaged files."""
        view = memoryview(buffer).cast("B")
        data = b""
        while not data:
            if not self._decoder.eof:
                raw = self._stream.read(_HEAD) if self._decoder.needs_input else b""
                if self._decoder.needs_input and not raw:
                    raise EOFError("it ends before its end mark")
            elif raw := self._next_file():
                self._decoder = lzma.LZMADecompressor(memlimit=_MOST_WINDOW)
            else:
                return 0
            data = self._decoder.decompress(raw, len(view))
        view[: len(data)] = data
        return len(data)

    def _next_file(self) -> bytes:
        """Return the first bytes of a file that follows in the same file, after zeros; without one, none."""
        rest = self._decoder.unused_data.lstrip(b"\0")
        while not rest and (part := self._stream.read(_HEAD)):
            rest = part.lstrip(b"\0")
        return rest

    def close(self) -> None:
        """Close the file."""
        self._stream.close()
        super().close()


def most_unpacked(path: Path) -> int:
    """Return the number of bytes to which a file may unpack."""
    return max(MOST_UNPACKED, MOST_RATIO * path.stat().st_size)


def unpacks_to_too_much(path: Path) -> str:
    """Return why a file is not read any further."""
    return (
        f"{path}: unpacks to more than {MOST_UNPACKED >> 20:,} MiB and {MOST_RATIO} times its size: "
        "unpack it yourself if that is right"
    )


def opened(path: Path) -> BinaryIO:
    """Open a file for its unpacked bytes. Raises OSError, and ValueError if a package is missing.

    Reading raises ValueError if the file unpacks to more than ``most_unpacked`` bytes.
    """
    stream, packing = _unpacking(path), packing_of(path)
    return cast(BinaryIO, io.BufferedReader(_Bounded(path, stream), _HEAD)) if packing else stream


def _unpacking(path: Path) -> BinaryIO:
    packing = packing_of(path)
    if packing == "zstd":
        try:
            import pyarrow
        except ImportError:
            raise ValueError(f"{path}: zstd needs pyarrow: pip install pyarrow") from None
        return cast(BinaryIO, io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd")))
    if packing == "xz":
        return cast(BinaryIO, io.BufferedReader(_Unxz(path.open("rb")), _HEAD))
    if packing:
        module = {"gzip": gzip, "bz2": bz2}[packing]
        return cast(BinaryIO, module.open(path, "rb"))
    return path.open("rb")


def kind_of(path: Path, key: str) -> Kind:
    """Return the kind of a file. Raises an error of ``DAMAGED`` or ValueError if it cannot be read.

    A ``.json`` file, or a file whose name says nothing, holds records if its first value is an object with ``key``.
    """
    name = path.name.lower()
    while name.endswith(_PACKED):
        name = name[: name.rindex(".")]
    head = head_of(path)
    _check_readable(path, head)
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


def head_of(path: Path) -> bytes:
    """Return the first unpacked bytes of a file. Raises an error of ``DAMAGED`` or ValueError if it cannot be read."""
    with opened(path) as stream:
        return stream.read(_HEAD)


def _check_readable(path: Path, head: bytes) -> None:
    """Raise ValueError for a file in a format that is not read, whose bytes would be taken as text otherwise."""
    others = dict.fromkeys(_MAGIC, "a file that is packed twice") if packing_of(path) else {}
    name = next((name for magic, name in {**_OTHERS, **others}.items() if head.startswith(magic)), "")
    if name or head[257:262] == b"ustar":
        raise ValueError(f"{path}: {name or 'a tar archive'}, which is not read: unpack or convert it")


def has_mark(path: Path) -> bool:
    """Return whether a file begins with the byte order mark of UTF-8, which is no part of its first line."""
    with path.open("rb") as stream:
        return stream.read(3) == b"\xef\xbb\xbf"


def begins_like_json(head: bytes) -> bool:
    """Return whether the first bytes of a file begin an object or a list of JSON."""
    return head.lstrip(_BLANK)[:1] in (b"{", b"[")


def is_unread_json(path: Path) -> bool:
    """Return whether a file of kind "text" begins like JSON; without ``.json`` in its name, with a key of an object."""
    head = head_of(path)
    return begins_like_json(head) if ".json" in path.name.lower() else _OBJECT.match(head) is not None


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
        value = json_value(record or b"")
    except ValueError:
        return "text"
    return "values" if isinstance(value, dict) and key in value else "text"


def records(path: Path, kind: Kind) -> Iterator[bytes | None]:
    """Yield each record of a file as a line of JSON, blank lines included; damaged records are yielded as they are.

    A record of more than ``MOST_BYTES`` is None, and is never in memory as a whole. Raises an error of ``DAMAGED`` or
    ValueError if the file cannot be read any further, or has more than ``MOST_ROWS`` records and one for each byte.
    """
    most = max(MOST_ROWS, path.stat().st_size)
    for number, record in enumerate(_records(path, kind), 1):
        if number > most:
            raise ValueError(f"{path}: has more than {most:,} records, blank ones included: unpack it yourself")
        yield record


def _records(path: Path, kind: Kind) -> Iterator[bytes | None]:
    if kind == "parquet":
        for row in parquet_rows(path):
            line = None if row is None else json.dumps(finite(row), default=str).encode()
            yield line if line is not None and len(line) <= MOST_BYTES else None
    elif kind == "values":
        yield from _values(path)
    else:
        with opened(path) as stream:
            for number, part in enumerate(lines(stream)):
                yield part.removeprefix(b"\xef\xbb\xbf") if part and not number else part


def plain_line(record: bytes | None) -> bytes:
    """Return a record as a line of an unpacked file: with one newline, and blank for a record that is too long."""
    return (record or b"").rstrip(b"\n") + b"\n"


def write_records(file: IO[bytes], folder: str, path: Path, kind: Kind) -> int:
    """Write the records of a file as plain lines to a file in ``folder``; return the number of records left out.

    Raises an error of ``DAMAGED``, or ValueError if the file cannot be read any further, or if less than
    ``MIN_FREE_BYTES`` of the disk would be left.
    """
    left_out, unchecked = 0, 0
    for line in records(path, kind):
        left_out += line is None
        unchecked -= file.write(plain_line(line))
        if unchecked < 0:
            if (free := shutil.disk_usage(folder).free) < MIN_FREE_BYTES + _CHECKED_BYTES:
                raise ValueError(
                    f"{path}: its unpacked records leave {free >> 20:,} MiB of the disk of {folder}: use a folder with "
                    "more space, or unpack the file"
                )
            unchecked = _CHECKED_BYTES
    return left_out


def lines(stream: BinaryIO) -> Iterator[bytes | None]:
    """Yield the lines of a file, and None for each line of more than ``MOST_BYTES``, which is never held whole."""
    while line := stream.readline(MOST_BYTES + 1):
        if len(line) <= MOST_BYTES:
            yield line
            continue
        while line and not line.endswith(b"\n"):
            line = stream.readline(1 << 20)
        yield None


def is_too_long(path: Path) -> bool:
    """Return whether a packed file has more than ``MOST_BYTES`` unpacked bytes; a plain file holds its bytes itself."""
    if not packing_of(path):
        return False
    left = MOST_BYTES
    with opened(path) as stream:
        while part := stream.read(1 << 20):
            left -= len(part)
            if left < 0:
                return True
    return False


def _values(path: Path) -> Iterator[bytes | None]:
    """Yield the values of a file of JSON: the elements of a list, or values one after the other.

    The file is read in parts. What follows a damaged value is one record, at most ``MOST_BYTES`` of it, and a value of
    more than ``MOST_BYTES`` ends the file.
    """
    decoder, text, place, inside, size = json.JSONDecoder(), "", 0, False, _HEAD
    with opened(path) as stream, io.TextIOWrapper(stream, "utf-8-sig", "surrogateescape", newline="") as characters:
        is_whole = False
        while True:
            place = _BETWEEN[inside].match(text, place).end()  # type: ignore[union-attr]  # matches any text
            if text[place : place + 1] == ("]" if inside else "["):
                inside, place = not inside, place + 1
                continue
            if is_whole and place == len(text):
                if inside:
                    yield b"["  # the list has no end
                return
            try:
                value, stop = decoder.raw_decode(text, place)
                is_read = is_whole or stop < len(text)  # a number may go on
            except (ValueError, RecursionError):
                is_read, stop = False, place
            if is_read:
                yield json.dumps(value, ensure_ascii=True).encode()
                place, size = stop, _HEAD
            elif is_whole:
                yield text[place:].encode("utf-8", errors="surrogateescape")
                return
            elif len(text) - place > MOST_BYTES:
                yield None
                return
            else:
                part = characters.read(size)
                text, place, is_whole, size = text[place:] + part, 0, not part, size * 2


def column_flaw(path: Path, key: str) -> str:
    """Return why a column of a Parquet file cannot hold texts, "" if it can. Raises ValueError for another file."""
    arrow, parquet = _arrow(path)
    try:
        with parquet.ParquetFile(path) as table:
            schema = table.schema_arrow
            kind = schema.field(key).type if schema.names.count(key) == 1 else None
    except Exception as error:  # pyarrow raises many types
        raise ValueError(f"{path}: not a Parquet file ({one_line(error, 160)})") from error
    if key not in schema.names:
        return f"no column {key!r} (found: {one_line(', '.join(schema.names), 200)})"
    if kind is not None and arrow.types.is_dictionary(kind):
        kind = kind.value_type
    if kind is None or not (arrow.types.is_string(kind) or arrow.types.is_large_string(kind)):
        return f"the column {key!r} is of type {kind or 'several columns'}, not text"
    return ""


def parquet_rows(path: Path) -> Iterator[dict[str, object] | None]:
    """Yield the rows of a Parquet file, and None for each row of more than ``MOST_BYTES``.

    Columns of text stay dictionaries until a row is made: a small file can repeat a long text in each row. Raises
    ValueError if it is another file, cannot be read any further, or unpacks to more than ``most_unpacked`` bytes.
    """
    _, parquet = _arrow(path)
    left = most_unpacked(path)
    try:
        with parquet.ParquetFile(path) as table:
            texts, batch_rows = _read_as(table, check_pages(path, table.metadata))
        with parquet.ParquetFile(path, read_dictionary=texts) as table:
            for batch in table.iter_batches(batch_rows):
                names, num_bytes = batch.schema.names, sum(map(_num_bytes, batch.columns))
                is_large, left = num_bytes > MOST_BYTES, left - num_bytes
                if left < 0:
                    break
                if not is_large:
                    for values in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                        yield dict(zip(names, values, strict=True))
                    continue
                for row in range(batch.num_rows):
                    if sum(_num_bytes(column.slice(row, 1)) for column in batch.columns) > MOST_BYTES:
                        yield None
                        continue
                    yield {name: column[row].as_py() for name, column in zip(names, batch.columns, strict=True)}
    except GeneratorExit:
        raise
    except Exception as error:  # pyarrow raises many types
        raise ValueError(f"{path}: cannot be read any further ({one_line(error, 160)})") from error
    if left < 0:
        raise ValueError(unpacks_to_too_much(path))


def _read_as(table: ParquetFile, pages: list[ColumnPages]) -> tuple[list[str], int]:
    """Return the columns that are read as dictionaries, and the rows that are read together.

    A value of another column of bytes may be as long as its page, and a page may repeat it in each row. Raises
    ValueError for lists of such values.
    """
    texts, longest = [], 0
    for number, column in enumerate(pages):
        leaf = table.schema.column(number)
        is_list, kind = leaf.max_repetition_level > 0, leaf.physical_type
        if kind == "BYTE_ARRAY" and leaf.logical_type.type in ("STRING", "NONE") and (is_list or not column.is_delta):
            texts.append(leaf.path)
        elif kind == "BYTE_ARRAY" or (kind == "FIXED_LEN_BYTE_ARRAY" and leaf.length > _SHORT):
            if is_list:
                raise ValueError(f"the column {leaf.path!r} has lists of bytes, which no limit holds")
            longest += column.largest
    return texts, max(1, min(_BATCH, _BATCH_BYTES // max(1, longest)))


def _num_bytes(column: Array) -> int:
    """Return the bytes of a column's values, where repeated texts of a dictionary count each time."""
    import pyarrow
    from pyarrow import compute

    kind = column.type
    if pyarrow.types.is_dictionary(kind):
        lengths = compute.binary_length(column.dictionary).cast("int64").take(column.indices)
        return int(compute.sum(lengths).as_py() or 0)
    if pyarrow.types.is_map(kind):
        column = column.cast(pyarrow.list_(pyarrow.struct([("key", kind.key_type), ("value", kind.item_type)])))
    if pyarrow.types.is_nested(kind):
        parts = column.flatten()
        return sum(map(_num_bytes, parts)) if isinstance(parts, list) else _num_bytes(parts)
    return int(column.nbytes)


def _arrow(path: Path) -> tuple[ModuleType, ModuleType]:
    """Return pyarrow and its module of Parquet files. Raises ValueError if it is not installed."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise ValueError(f"{path}: Parquet needs pyarrow: pip install pyarrow") from None
    return pyarrow, parquet
