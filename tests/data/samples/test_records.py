"""Files of every kind and packing give the same documents in ``corpus`` and in ``data clean``."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import resource
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from datatrove.data import Document

from bytescale_ext.data.clean.readers import Collect, documents_of
from bytescale_ext.data.clean.recipe import Recipe, Source, files_of, read_recipe
from bytescale_ext.data.clean.tally import JSON_AS_TEXT
from bytescale_ext.data.samples import records as records_module
from bytescale_ext.data.samples.records import kind_of, parquet_rows, records
from bytescale_ext.data.samples.sources import contents, file_entries, source_entries, unread_json
from tests.data.cleaning import run_steps, told

TEXTS = ["one", "two \u2028 and \x85 and \x0c", "drei"]
DOCUMENTS = [{"text": text, "url": f"u/{number}"} for number, text in enumerate(TEXTS)]
LINES = "".join(json.dumps(document, ensure_ascii=False) + "\n" for document in DOCUMENTS).encode()


def zstd(raw: bytes) -> bytes:
    import pyarrow

    packed: bytes = pyarrow.compress(raw, codec="zstd", asbytes=True)
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(raw)
    packed = sink.getvalue().to_pybytes()
    return packed


PACKINGS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstd,
}  # fmt: skip
KINDS = {
    "a.jsonl": LINES,
    "a.ndjson": LINES,
    "a.json": LINES,
    "a": LINES,
    "A.JSONL": LINES,
    "list.json": json.dumps(DOCUMENTS, indent=1).encode(),
    "values.json": "\n".join(json.dumps(document, indent=1) for document in DOCUMENTS).encode(),
    "marked.json": b"\xef\xbb\xbf" + LINES,
    "returns.jsonl": LINES.replace(b"\n", b"\r\n"),
}


def both(path: Path) -> tuple[list[str], list[str]]:
    """Return the texts that the two commands read from a file."""
    corpus = [raw.decode() for _, raw in contents(file_entries(path), "text") if raw]
    read = documents_of(path, Source("docs", str(path.parent), "auto", "*", ()), "text")
    return corpus, [each.text for each in read if isinstance(each, Document)]


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("name", KINDS)
def test_documents_of_each_kind_and_packing(name: str, packing: str, tmp_path: Path) -> None:
    path = tmp_path / f"{name}{packing}"
    path.write_bytes(PACKINGS[packing](KINDS[name]))
    assert both(path) == (TEXTS, TEXTS)
    (tmp_path / "misnamed.jsonl").write_bytes(PACKINGS[packing](LINES))
    assert both(tmp_path / "misnamed.jsonl") == (TEXTS, TEXTS)
    plain = tmp_path / f"plain.txt{packing}"
    plain.write_bytes(PACKINGS[packing](b"plain"))
    assert both(plain) == (["plain"], ["plain"])


def test_xz_files_take_little_memory_and_may_follow_each_other(tmp_path: Path) -> None:
    """Python's reader would take as much memory as a header asks for, here 1 GiB."""
    head = LINES[: LINES.index(b"\n") + 1]
    packed = lzma.compress(head)
    (tmp_path / "a.jsonl").write_bytes(packed + bytes(8) + lzma.compress(LINES[len(head) :]) + bytes(4))
    assert both(tmp_path / "a.jsonl") == (TEXTS, TEXTS)
    header = packed.index(b"\x21\x01", 12)  # its filter and the size of its window, at the end a checksum
    block = bytearray(packed[12 : 12 + 4 * (packed[12] + 1)])
    block[header - 10] = 36
    block[-4:] = zlib.crc32(block[:-4]).to_bytes(4, "little")
    for bad, message in (
        (packed[:12] + block + packed[12 + len(block) :], "Memory usage limit exceeded"),
        (packed + bytes(4) + packed[:30], "it ends before its end mark"),
        (packed + b"other", "Input format not supported"),
    ):
        (tmp_path / "b.jsonl").write_bytes(bad)
        with pytest.raises(ValueError, match=rf"b.jsonl: cannot read \({message}"):
            file_entries(tmp_path / "b.jsonl")


def test_rows_of_parquet(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(DOCUMENTS), tmp_path / "a.parquet")
    assert both(tmp_path / "a.parquet") == (TEXTS, TEXTS)
    (tmp_path / "b.parquet").write_bytes(b"no table")
    with pytest.raises(ValueError, match=r"b.parquet: .*Parquet"):
        file_entries(tmp_path / "b.parquet")


def test_a_folder_of_shards_and_a_pattern(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl.gz", "c.json", "sub"):
        (tmp_path / name).mkdir() if name == "sub" else (tmp_path / name).write_bytes(
            PACKINGS[".gz" if name.endswith(".gz") else ""](LINES)
        )
    (tmp_path / "sub" / "d.txt").write_text("text")
    entries = source_entries([str(tmp_path)], "*")
    corpus = [raw.decode() for _, raw in contents(entries, "text")]
    recipe = read_recipe(None, [f"docs={tmp_path}"], {})
    cleaned = [
        each.text
        for number, path in files_of(recipe.sources)
        for each in documents_of(path, recipe.sources[number], "text")
        if isinstance(each, Document)
    ]
    assert corpus == cleaned == [*TEXTS * 3, "text"]
    assert len(source_entries([str(tmp_path / "*.jsonl*")], "*")) == 6
    pattern = read_recipe(None, [f"docs={tmp_path}/*.jsonl*"], {})
    assert [path.name for _, path in files_of(pattern.sources)] == ["a.jsonl", "b.jsonl.gz"]
    shuffled = [entries[i] for i in (5, 0, 9, 4, 8, 3, 1)]
    order = [TEXTS[2], TEXTS[0], "text", TEXTS[1], TEXTS[2], TEXTS[0], TEXTS[1]]
    assert [raw.decode() for _, raw in contents(shuffled, "text")] == order


def test_json_without_documents_is_text_and_is_told(tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text('{"a": 1}\n')
    (tmp_path / "notes.txt").write_text("{")
    (tmp_path / "links.md").write_text("[text](link)")
    (tmp_path / "lines.txt").write_bytes(LINES)
    entries = source_entries([str(tmp_path)], "*")
    assert [entry.line for entry in entries] == [None] * 4
    assert [path.name for path in unread_json(entries)] == ["lines.txt", "settings.json"]
    docs = Source("docs", str(tmp_path), "auto", "*", ())
    run_steps([Collect(Recipe((docs,)), tmp_path / "tallies")])
    assert told(tmp_path).counts["docs"] == {"read": 4, JSON_AS_TEXT: 2}
    assert kind_of(tmp_path / "settings.json", "a") == "lines"


@pytest.mark.parametrize("packing", [".gz", ".bz2", ".xz"])
def test_a_damaged_file_is_one_line(packing: str, tmp_path: Path) -> None:
    path = tmp_path / f"a.jsonl{packing}"
    path.write_bytes(PACKINGS[packing](LINES * 1000)[:-40])
    with pytest.raises(ValueError, match="cannot read"):
        file_entries(path)
    found = list(documents_of(path, Source("docs", str(tmp_path), "auto", "*", ()), "text"))
    assert not isinstance(found[-1], Document)


@pytest.mark.parametrize("line", ['{"text": "a", "x": NaN}', '{"text": "a", "x": -Infinity}', "[" * 100_000])
def test_what_json_lacks_is_one_line(line: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f"{line}\n")
    with pytest.raises(ValueError, match=r"a.jsonl:1: not JSON"):
        list(contents(file_entries(path), "text"))
    (found,) = documents_of(path, Source("docs", str(tmp_path), "jsonl", "*", ()), "text")
    assert not isinstance(found, Document)


def test_a_long_list_is_read_in_parts(tmp_path: Path) -> None:
    texts = [f"{number} " * 3000 for number in range(40)]
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"text": text} for text in texts]))
    assert both(path) == (texts, texts)
    path.write_bytes(path.read_bytes()[:-10])  # all but the last are whole
    with pytest.raises(ValueError, match=r"a.json:40: not JSON"):
        list(contents(file_entries(path), "text"))
    found = list(documents_of(path, Source("docs", str(tmp_path), "auto", "*", ()), "text"))
    assert [each.text for each in found[:-1] if isinstance(each, Document)] == texts[:-1]
    assert not isinstance(found[-1], Document)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json", "a.json.xz", "a.txt.bz2"])
def test_records_that_are_too_long_are_left_out(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("samples.records", "clean.readers"):
        monkeypatch.setattr(f"bytescale_ext.data.{module}.MOST_BYTES", 1000)
    path, rows = tmp_path / name, [{"text": "one"}, {"text": "x" * 200_000}]
    rows += [] if ".json." in name + "." else [{"text": "two"}]  # a list ends there
    raw = json.dumps(rows).encode() if ".json." in name + "." else b"\n".join(json.dumps(row).encode() for row in rows)
    path.write_bytes(PACKINGS[path.suffix if path.suffix in PACKINGS else ""](raw))
    expected = [] if ".txt" in name else [str(row["text"]) for row in rows if len(row["text"]) < 1000]
    assert both(path) == (expected, expected)
    assert sum(entry.is_too_long for entry in file_entries(path)) == 1
    found = documents_of(path, Source("docs", str(tmp_path), "auto", "*", ()), "text")
    assert [each.why for each in found if not isinstance(each, Document)] == ["a document of more than 128 MiB"]


@pytest.mark.slow
def test_a_repeated_text_of_parquet_is_in_memory_once(tmp_path: Path) -> None:
    """1,000 rows of 8 MB are a file of a few KB."""
    import pyarrow
    from pyarrow import parquet

    column = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 1000), pyarrow.array(["a" * (8 << 20)]))
    parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a", store_schema=False)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert sum(len(str(row["text"])) for _, row in zip(range(300), parquet_rows(tmp_path / "a"), strict=False)) > 2e9
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 << 10


OTHERS = [
    b"PK\x03\x04 zip", b"ARROW1\0\0", b"%PDF-1.7", b"\0" * 257 + b"ustar",
    gzip.compress(gzip.compress(LINES, mtime=0), mtime=0), gzip.compress(b"\0" * 257 + b"ustar", mtime=0),
]  # fmt: skip


@pytest.mark.parametrize("content", OTHERS)
def test_other_formats_are_no_text(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.bin: an? .*, which is not read: unpack or convert it$"):
        file_entries(path)
    (found,) = documents_of(path, Source("docs", str(tmp_path), "auto", "*", ()), "text")
    assert getattr(found, "kind", "") == "broken"


@pytest.mark.parametrize("line", [b"\n", b"{}\n"])
def test_packed_files_have_a_limit_of_records(line: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Millions of blank lines take a few bytes when they are packed."""
    monkeypatch.setattr(records_module, "MOST_ROWS", 1000)
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(line * 1000))
    assert len(list(records(path, "lines"))) == 1000
    path.write_bytes(gzip.compress(line * 100_000))
    with pytest.raises(ValueError, match=r"has more than 1,000 records|has more than \d,\d+ records"):
        list(records(path, "lines"))
