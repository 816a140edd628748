"""Headers of the pages of a Parquet file, read before pyarrow allocates what they ask for.

The format is Thrift's compact protocol (https://github.com/apache/parquet-format, ``parquet.thrift``).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final, cast

if TYPE_CHECKING:
    from pyarrow.parquet import ColumnChunkMetaData, FileMetaData

MOST_ROWS: Final = 10_000_000
"""Rows that a file of any size may have; a larger file may have 8 for each byte."""
MOST_VALUES: Final = 4 * MOST_ROWS
"""Values of all columns, elements of lists included, that a file of any size may have; a larger one 8 for each byte."""
MOST_PAGE_BYTES: Final = 128 << 20
"""Unpacked bytes that a page of any size may have; a larger page may have ``MOST_RATIO`` times its packed bytes."""
MOST_GROUP_BYTES: Final = 1 << 30
"""Unpacked bytes that the largest pages of all columns of a row group may have together, in a file of any size."""
MOST_RATIO: Final = 250
_HEADERS: Final = (1 << 16, 1 << 24)  # bytes of a header that are read; pyarrow reads at most 16 MiB
_DEPTH: Final = 8
_DICTIONARY, _SIZES = 2, (2, 3)  # a type of page; fields of the header: unpacked and packed bytes
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
        """Return a value: a number, the fields of a struct, or None for what no check needs."""
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
            head = self.byte()
            for _ in range(self.number() if head >> 4 == 15 else head >> 4):
                self.value(3 if head & 15 in (1, 2) else head & 15, depth + 1)
            return None
        if kind == 12:
            return self.struct(depth + 1)
        raise ValueError("a page header has a field of an unknown type")

    def struct(self, depth: int = 0) -> dict[int, object]:
        fields: dict[int, object] = {}
        name = 0
        while head := self.byte():
            if head >> 4:
                name += head >> 4
            else:
                name = cast(int, self.value(4, depth))
            fields[name] = self.value(head & 15, depth)
        return fields


def check_pages(path: Path, metadata: FileMetaData) -> None:
    """Check that a Parquet file can hold what its metadata and the headers of its pages claim.

    Reads the headers of all pages, and no values.

    Raises:
        ValueError: the file claims too many rows or values, or a page is damaged, larger than the file or unpacks to
            too much.
    """
    size = path.stat().st_size
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    rows = max(metadata.num_rows, sum(group.num_rows for group in groups))
    if rows > max(MOST_ROWS, 8 * size):
        raise ValueError(f"it claims {rows:,} rows in {size:,} bytes")
    num_values = 0
    with path.open("rb") as stream:
        for group in groups:
            pages = [_pages(stream, size, group.column(number)) for number in range(group.num_columns)]
            num_values += sum(values for _, values in pages)
            if num_values > max(MOST_VALUES, 8 * size):
                raise ValueError(f"it claims {num_values:,} values or more in {size:,} bytes")
            total = sum(largest for largest, _ in pages)
            if total > max(MOST_GROUP_BYTES, MOST_RATIO * size):
                raise ValueError(f"a page of each column takes {total:,} bytes together, in a file of {size:,}")


def _pages(stream: BinaryIO, size: int, column: ColumnChunkMetaData) -> tuple[int, int]:
    """Return the unpacked bytes of the dictionary and of the largest page of a column in a row group, and its values.

    An element of a list is a value; a page without bytes can repeat it any number of times.
    """
    starts = [column.data_page_offset, column.dictionary_page_offset or column.data_page_offset]
    place = min(start for start in starts if start > 0) if max(starts) > 0 else 0
    end, values, dictionary, largest = min(size, place + column.total_compressed_size), 0, 0, 0
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
