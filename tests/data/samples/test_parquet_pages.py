"""Parquet files that claim more than they hold are refused before memory is allocated."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from bytescale_ext.data.clean.readers import BadRecord, documents_of
from bytescale_ext.data.clean.recipe import Source
from bytescale_ext.data.samples import parquet_pages, records
from bytescale_ext.data.samples.parquet_pages import _header
from bytescale_ext.data.samples.records import parquet_rows
from bytescale_ext.data.samples.sources import contents, file_entries
from tests.sample import examples

SOURCE = Source("docs", "unused", "jsonl", "*", ())
TEXTS = [f"text {number} of a page" * 9 for number in range(99)]


def varint(number: int) -> bytes:
    parts = bytearray()
    while number > 127:
        parts.append(number & 127 | 128)
        number >>= 7
    return bytes([*parts, number])


def zigzag(number: int) -> bytes:
    return varint(number << 1 if number >= 0 else (-number << 1) - 1)


def header(unpacked: int, packed: int, values: int = 99) -> bytes:
    """Return the header of a data page in Thrift's compact protocol."""
    data = b"\x15" + zigzag(values) + b"\x15\x00\x15\x06\x15\x06\x00"
    return b"\x15\x00\x15" + zigzag(unpacked) + b"\x15" + zigzag(packed) + b"\x2c" + data + b"\x00"


def file_with(path: Path, head: bytes | None, **sizes: int) -> Path:
    """Write a Parquet file whose first page has this header, or sizes other than its own."""
    parquet.write_table(pyarrow.table({"text": TEXTS}), path, compression="none", use_dictionary=False)
    content = path.read_bytes()
    with path.open("rb") as stream:
        own, num_bytes = _header(stream, 4)
    if head is None:
        packed = own[3] + num_bytes - len(header(1 << 30, 1 << 10))
        head = header(**{"unpacked": packed, "packed": packed, **sizes})
    path.write_bytes(content[:4] + head + content[4 + len(head) :])
    return path


BAD = {
    "claims to unpack from": {"unpacked": 2**31 - 1},
    "more than the file has": {"packed": 2**31 - 1},
    "a page has no size": {"packed": -1},
    "no size": {"unpacked": -(2**31)},
}
HEADERS = {
    "nested too deeply": b"\x5c" * 500,
    "of an unknown type": b"\x1f" * 500,
    "more than 64 bits": b"\x15" + b"\xff" * 500,
    "has no size|cut short|unknown": b"\x19\xf3" + b"\xff" * 8 + b"\x7f" + b"\0" * 300,
    "a page header|a page has no size|cannot be read": b"\0" * 500,
}


def files(folder: Path) -> dict[str, Path]:
    folder.mkdir(exist_ok=True)
    found = {text: file_with(folder / f"{number}", None, **sizes) for number, (text, sizes) in enumerate(BAD.items())}
    return found | {text: file_with(folder / f"h{i}", head) for i, (text, head) in enumerate(HEADERS.items())}


def test_pages_that_claim_too_much_are_refused(tmp_path: Path) -> None:
    for text, path in files(tmp_path).items():
        with pytest.raises(ValueError, match=rf"^{path}: cannot be read any further \(.*({text})"):
            list(parquet_rows(path))


@pytest.mark.ranks
def test_pages_are_refused_before_pyarrow_reads_them(tmp_path: Path) -> None:
    """The process may take 256 MiB of addresses more than it had before the files are read."""
    names = [str(path) for path in files(tmp_path).values()]
    code = """
import resource, sys
from pathlib import Path
from bytescale_ext.data.samples.records import parquet_rows
def outcomes(names):
    for name in names:
        try:
            list(parquet_rows(Path(name)))
        except ValueError as error:
            yield str(error)
assert len(list(parquet_rows(Path(sys.argv[1])))) == 99
now = int(next(l for l in open("/proc/self/status") if l.startswith("VmSize")).split()[1]) << 10
resource.setrlimit(resource.RLIMIT_AS, (now + (256 << 20),) * 2)
found = list(outcomes(sys.argv[2:]))
assert len(found) == len(sys.argv) - 2, found
assert not any("alloc" in text for text in found), found
"""
    good = tmp_path / "good.parquet"
    parquet.write_table(pyarrow.table({"text": TEXTS}), good)
    ended = subprocess.run(
        [sys.executable, "-c", code, str(good), *names], capture_output=True, text=True, timeout=600, check=False
    )
    assert ended.returncode == 0, ended.stderr


def test_rows_without_bytes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.parquet"
    parquet.write_table(pyarrow.table({"text": pyarrow.nulls(1_000_000, pyarrow.string())}), path)
    monkeypatch.setattr(parquet_pages, "MOST_ROWS", 100_000)
    with pytest.raises(ValueError, match=r"it claims 1,000,000 rows in [\d,]+ bytes"):
        list(parquet_rows(path))


@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_values_without_bytes_are_refused(version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page can repeat the element of a list any number of times, whatever its size and its number of rows."""
    path = tmp_path / "x.parquet"
    table = pyarrow.table({"text": ["x"] * 4, "ones": [[1] * 100_000] * 4})
    parquet.write_table(table, path, data_page_version=version, row_group_size=2)
    assert path.stat().st_size < 10_000
    assert sum(len(row["ones"]) for row in parquet_rows(path) if row is not None) == 400_000  # type: ignore[arg-type]
    monkeypatch.setattr(parquet_pages, "MOST_VALUES", 300_000)
    with pytest.raises(ValueError, match=r"it claims 400,004 values or more in [\d,]+ bytes"):
        list(parquet_rows(path))


@pytest.mark.ranks
def test_no_change_of_a_footer_ends_the_process(tmp_path: Path) -> None:
    """pyarrow ends the process when it shows a column whose statistics do not fit the schema."""
    path = tmp_path / "x.parquet"
    table = pyarrow.table({"text": TEXTS, "numbers": list(range(99))})
    parquet.write_table(table, path, compression="zstd", write_page_index=True)
    code = """
import sys
from pathlib import Path
from bytescale_ext.data.samples.records import parquet_rows
path = Path(sys.argv[1])
content = path.read_bytes()
end = len(content) - 8
for place in range(end - int.from_bytes(content[end : end + 4], "little"), end, int(sys.argv[2])):
    for flip in (1, 3, 16):
        changed = bytearray(content)
        changed[place] ^= flip
        path.write_bytes(changed)
        try:
            list(parquet_rows(path))
        except ValueError as error:
            assert str(error).startswith(f"{path}: "), error
"""
    distance = 4 // examples(4)  # of the bytes that are changed
    command = [sys.executable, "-c", code, str(path), str(distance)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr[-2000:]


@pytest.mark.parametrize("encoding", ["DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY"])
def test_texts_that_are_differences_are_read(encoding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text of a few bytes can repeat the text before, so few rows are read together if pages are large."""
    path = tmp_path / "x.parquet"

    def write(table: pyarrow.Table, column: str) -> None:
        parquet.write_table(table, path, use_dictionary=False, column_encoding={column: encoding})

    table = pyarrow.table({"text": ["a text " * 1000] * 600})
    write(table, "text")
    assert list(parquet_rows(path)) == table.to_pylist()
    sizes: list[int] = []
    monkeypatch.setattr(records, "_num_bytes", lambda column: sizes.append(len(column)) or 0)
    monkeypatch.setattr(records, "_BATCH_BYTES", 3 * path.stat().st_size)
    assert list(parquet_rows(path)) == table.to_pylist()
    assert 1 <= max(sizes) <= 3
    write(pyarrow.table({"text": ["x"], "lists": [["a", "ab"]]}), "lists.list.element")
    with pytest.raises(ValueError, match="cannot be read any further"):
        list(parquet_rows(path))


def test_lists_of_long_values_without_a_limit_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    long = pyarrow.array([[b"x" * 100] * 3], pyarrow.list_(pyarrow.binary(100)))
    short = pyarrow.array([[b"x" * 16] * 3], pyarrow.list_(pyarrow.binary(16)))
    parquet.write_table(pyarrow.table({"text": ["x"], "short": short}), path)
    assert len(list(parquet_rows(path))) == 1
    parquet.write_table(pyarrow.table({"text": ["x"], "long": long}), path)
    with pytest.raises(ValueError, match=r"the column 'long.list.element' has lists of bytes, which no limit holds"):
        list(parquet_rows(path))


def test_pages_of_many_columns_are_refused_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.parquet"
    columns = {f"column {number}": ["x" * 10_000] for number in range(20)}
    parquet.write_table(pyarrow.table(columns), path, compression="zstd")
    assert len(list(parquet_rows(path))) == 1
    monkeypatch.setattr(parquet_pages, "MOST_GROUP_BYTES", 1000)
    monkeypatch.setattr(parquet_pages, "MOST_RATIO", 2)
    with pytest.raises(ValueError, match=r"a page of each column takes [\d,]+ bytes together"):
        list(parquet_rows(path))


def test_nested_columns_come_back_and_long_rows_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.parquet"
    pairs = pyarrow.map_(pyarrow.string(), pyarrow.string())
    table = pyarrow.table(
        {
            "text": ["one", "two", None],
            "tags": [["a", "b"], ["x" * 100] * 100, None],
            "object": [{"x": "y", "n": 1}] * 3,
            "pairs": pyarrow.array([[("k", "v")], [], None], pairs),
            "bytes": [b"x", b"y", b"z"],
            "large": pyarrow.array(["u"] * 3, pyarrow.large_string()),
            "lists": [[["a"]], [[]], None],
        }
    )
    for version in ("1.0", "2.0"):
        parquet.write_table(table, path, compression="zstd", data_page_version=version)
        assert list(parquet_rows(path)) == table.to_pylist()
    monkeypatch.setattr(records, "MOST_BYTES", 5_000)
    first, second, third = table.to_pylist()
    assert list(parquet_rows(path)) == [first, None, third]
    assert second["text"] == "two"


def test_the_total_of_a_packed_file_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl.gz"
    line = json.dumps({"text": "x" * 1000}).encode() + b"\n"
    path.write_bytes(gzip.compress(line * 100))
    assert len(file_entries(path)) == 100
    monkeypatch.setattr(records, "MOST_UNPACKED", 50_000)
    monkeypatch.setattr(records, "MOST_RATIO", 2_000)
    assert len(file_entries(path)) == 100  # the ratio allows it
    monkeypatch.setattr(records, "MOST_RATIO", 2)
    with pytest.raises(ValueError, match=rf"^{path}: unpacks to more than 0 MiB and 2 times its size: unpack it"):
        file_entries(path)
    plain = tmp_path / "a.jsonl"
    plain.write_bytes(line * 100)
    assert len(file_entries(plain)) == 100
    (bad,) = [record for record in documents_of(path, SOURCE, "text") if isinstance(record, BadRecord)]
    assert "cannot be read any further (unpacks to more than" in bad.why
    table = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": ["x" * 1000] * 100}), table)
    with pytest.raises(ValueError, match=rf"^{table}: unpacks to more than"):
        file_entries(table)
    (bad,) = [
        record
        for record in documents_of(table, replace(SOURCE, format="parquet"), "text")
        if isinstance(record, BadRecord)
    ]
    assert bad.why.startswith("unpacks to more than")


def test_unpacked_records_leave_space_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "x"}\n'))
    entries = file_entries(path)
    assert [text for _, text in contents(entries, "text")] == [b"x"]
    monkeypatch.setattr(records, "MIN_FREE_BYTES", 1 << 60)
    with pytest.raises(ValueError, match=rf"^{path}: its unpacked records leave [\d,]+ MiB of the disk of "):
        list(contents(entries, "text"))
