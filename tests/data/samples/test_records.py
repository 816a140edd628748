"""Files of every kind and packing give the same documents in ``corpus`` and in ``data clean``."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path

import pytest
from datatrove.data import Document

from bytescale_ext.data.clean.readers import documents_of
from bytescale_ext.data.clean.recipe import Source, files_of, read_recipe
from bytescale_ext.data.samples.records import kind_of
from bytescale_ext.data.samples.sources import contents, file_entries, source_entries, unread_json

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
    entries = source_entries([str(tmp_path)], "*")
    assert [entry.line for entry in entries] == [None, None]
    assert [path.name for path in unread_json(entries)] == ["settings.json"]
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
