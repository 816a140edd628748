"""Footer of a Parquet file and headers of its pages, read before pyarrow allocates what they ask for.

pyarrow ends the process if the statistics of a column do not fit its schema, so its own view of columns is not used.

The format is Thrift's compact protocol (https://github.com/apache/parquet-format, ``parquet.thrift``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final, cast

if TYPE_CHECKING:
    from pyarrow.parquet import FileMetaData

MOST_ROWS: Final = 1_000_000
"""Rows or records that a file of any size may have; a larger file may have one for each byte."""
MOST_VALUES: Final = 40 * MOST_ROWS
"""Values of all columns, elements of lists included, that a file of any size may have; a larger one 8 for each byte."""
MOST_PAGE_BYTES: Final = 128 << 20
"""Unpacked bytes that a page of any size may have; a larger page may have ``MOST_RATIO`` times its packed bytes."""
MOST_GROUP_BYTES: Final = 1 << 30
"""Unpacked bytes that the largest pages of all columns of a row group may have together, in a file of any size."""
MOST_RATIO: Final = 250
_HEADERS: Final = (1 << 16, 1 << 24)  # bytes of a header that are read; pyarrow reads at most 16 MiB
_DEPTH: Final = 16
_MOST_LISTED: Final = 64  # numbers of a list that are kept
_DICTIONARY, _SIZES = 2, (2, 3)  # a type of page; fields of the header: unpacked and packed bytes
_TRAILER: Final = 8  # length of the footer and magic bytes
_DELTA: Final = {6, 7}  # encodings of texts by differences, which pyarrow cannot read as a dictionary
_DATA: Final = (5, 8)  # fields of the header: data pages, whose first field is the number of values


class _Cut(ValueError):
    """A header ends behind its bytes."""


class _Compact:
    """A reader of Thrift's compact protocol."""

    def __init__(self, data: bytes) -> None:
        self.data, self.place = data, 0

    def byte(self) -> int:
        if self.place >= len(self.data):
            raise _Cut("a page header is cut short")
        self.place += 1
        return self.data[self.place - 1]

    def number(self) -> int:
        """Return a number without a sign."""
        value = shift = 0
        while True:
            byte = self.byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7
            if shift > 63:
                raise ValueError("a page header has a number of more than 64 bits")

    def value(self, kind: int, depth: int) -> object:
        """Return a value: a number, the fields of a struct, the first values of a list, or None for others."""
        if depth > _DEPTH:
            raise ValueError("a page header is nested too deeply")
        if kind in (1, 2):  # a truth value of a field is its kind
            return None
        if kind == 3:
            return self.byte()
        if kind in (4, 5, 6):
            number = self.number()
            return number >> 1 ^ -(number & 1)
        if kind in (7, 8):
            num_bytes = 8 if kind == 7 else self.number()
            self.place += num_bytes
            return None
        if kind in (9, 10):
            element, size = self.list_head()
            kept = [self.value(3 if element in (1, 2) else element, depth + 1) for _ in range(min(size, _MOST_LISTED))]
            for _ in range(size - len(kept)):
                self.value(3 if element in (1, 2) else element, depth + 1)
            return kept
        if kind == 12:
            return self.struct(depth + 1)
        raise ValueError("a page header has a field of an unknown type")

    def list_head(self) -> tuple[int, int]:
        """Return the kind of the elements of a list, and their number."""
        head = self.byte()
        return head & 15, self.number() if head >> 4 == 15 else head >> 4

    def fields(self, depth: int = 0) -> Iterator[tuple[int, int]]:
        """Yield the name and kind of each field of a struct. The caller reads the value before the next."""
        name = 0
        while head := self.byte():
            if head >> 4:
                name += head >> 4
            else:
                name = cast(int, self.value(4, depth))
            yield name, head & 15

    def struct(self, depth: int = 0) -> dict[int, object]:
        return {name: self.value(kind, depth) for name, kind in self.fields(depth)}


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A column of a row group: its values, its bytes and place in the file, and whether texts are differences."""

    num_values: int
    num_bytes: int
    place: int
    is_delta: bool

    @classmethod
    def of(cls, fields: dict[int, object]) -> _Chunk:
        numbers = {name: value for name, value in fields.items() if isinstance(value, int)}
        starts = [start for name in (9, 11) if (start := numbers.get(name, 0)) > 0]
        encodings = fields.get(2)
        is_delta = isinstance(encodings, list) and not _DELTA.isdisjoint(encodings)
        return cls(numbers.get(5, 0), numbers.get(7, 0), min(starts, default=0), is_delta)


def _row_groups(path: Path, num_columns: int) -> Iterator[tuple[int, list[_Chunk]]]:
    """Yield the rows and the columns of each row group in the footer of a file."""
    size = path.stat().st_size
    with path.open("rb") as stream:
        stream.seek(size - _TRAILER)
        length = int.from_bytes(stream.read(4), "little")
        stream.seek(max(0, size - _TRAILER - length))
        reader = _Compact(stream.read(length))
    for name, kind in reader.fields():
        if (name, kind) != (4, 9):
            reader.value(kind, 0)
            continue
        for _ in range(reader.list_head()[1]):
            yield _row_group(reader, num_columns)


def _row_group(reader: _Compact, num_columns: int) -> tuple[int, list[_Chunk]]:
    rows, chunks = 0, []
    for name, kind in reader.fields():
        if (name, kind) != (1, 9):
            value = reader.value(kind, 0)
            rows = value if name == 3 and isinstance(value, int) else rows
            continue
        count = reader.list_head()[1]
        if count != num_columns:
            raise ValueError(f"a row group has {count:,} columns, and the schema {num_columns:,}")
        for _ in range(count):
            fields = reader.struct().get(3)
            chunks.append(_Chunk.of(cast(dict[int, object], fields) if isinstance(fields, dict) else {}))
    return rows, chunks


@dataclass(frozen=True, slots=True)
class ColumnPages:
    """Pages of a column in all row groups.

    Attributes:
        largest: unpacked bytes of the largest dictionary and the largest page together.
        is_delta: whether texts are stored as differences to the text before, which no dictionary can hold.
    """

    largest: int = 0
    is_delta: bool = False


def check_pages(path: Path, metadata: FileMetaData) -> list[ColumnPages]:
    """Check that a Parquet file can hold what its metadata and the headers of its pages claim.

    Reads the footer and the headers of all pages, and no values.

    Returns the pages of each column.

    Raises:
        ValueError: the file claims too many rows or values, or a page is damaged, larger than the file or unpacks to
            too much.
    """
    size = path.stat().st_size
    rows = num_values = 0
    columns = [ColumnPages()] * metadata.num_columns
    with path.open("rb") as stream:
        for group_rows, chunks in _row_groups(path, metadata.num_columns):
            rows += max(0, group_rows)
            if max(rows, metadata.num_rows) > max(MOST_ROWS, size):
                raise ValueError(f"it claims {max(rows, metadata.num_rows):,} rows in {size:,} bytes")
            pages = [_pages(stream, size, chunk) for chunk in chunks]
            num_values += sum(values for _, values in pages)
            if num_values > max(MOST_VALUES, 8 * size):
                raise ValueError(f"it claims {num_values:,} values or more in {size:,} bytes")
            total = sum(largest for largest, _ in pages)
            if total > max(MOST_GROUP_BYTES, MOST_RATIO * size):
                raise ValueError(f"a page of each column takes {total:,} bytes together, in a file of {size:,}")
            columns = [
                ColumnPages(max(one.largest, largest), one.is_delta or chunk.is_delta)
                for one, chunk, (largest, _) in zip(columns, chunks, pages, strict=False)
            ]
    return columns


def _pages(stream: BinaryIO, size: int, column: _Chunk) -> tuple[int, int]:
    """Return the unpacked bytes of the dictionary and of the largest page of a column in a row group, and its values.

    An element of a list is a value; a page without bytes can repeat it any number of times.
    """
    place = column.place
    end, values, dictionary, largest = min(size, place + column.num_bytes), 0, 0, 0
    while place < end and values < column.num_values:
        header, num_bytes = _header(stream, place)
        unpacked, packed = (header.get(field) for field in _SIZES)
        if not (isinstance(unpacked, int) and isinstance(packed, int) and unpacked >= 0 and packed >= 0):
            raise ValueError("a page has no size")
        place += num_bytes + packed
        if place > size:
            raise ValueError(f"a page claims {packed:,} bytes, more than the file has")
        if unpacked > max(MOST_PAGE_BYTES, MOST_RATIO * packed):
            raise ValueError(f"a page claims to unpack from {packed:,} to {unpacked:,} bytes")
        if header.get(1) == _DICTIONARY:
            dictionary = max(dictionary, unpacked)
            continue
        largest = max(largest, unpacked)
        data = next((header[field] for field in _DATA if isinstance(header.get(field), dict)), {})
        number = cast(dict[int, object], data).get(1, 0)
        values += max(0, number) if isinstance(number, int) else 0
    return dictionary + largest, max(values, column.num_values)


def _header(stream: BinaryIO, place: int) -> tuple[dict[int, object], int]:
    """Return the header of the page at a place of a file, and its bytes."""
    for most in _HEADERS:
        stream.seek(place)
        reader = _Compact(stream.read(most))
        try:
            return reader.struct(), reader.place
        except _Cut:
            if most == _HEADERS[-1] or len(reader.data) < most:
                raise
    raise AssertionError
