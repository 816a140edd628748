"""Readers of each format, and unreadable records in their files."""

from __future__ import annotations

import gzip
import io
import json
import time
from functools import partial
from pathlib import Path

import pytest
from datatrove.data import Document

from bytescale_ext.data.clean import readers
from bytescale_ext.data.clean.readers import BadRecord, Collect, documents_of
from bytescale_ext.data.clean.recipe import Recipe, Source
from bytescale_ext.data.samples import records, template_limits
from bytescale_ext.data.samples.template_limits import LimitedFunction
from tests.data.cleaning import folder_of, run_steps, told

PAGE = (
    "<html><body><nav>menu</nav><article><p>A harbour is a part of a body of water that is deep enough for ships to "
    "anchor.</p><p>Lighthouses guide the ships at night along the coast of the country.</p></article></body></html>"
)


def read(path: Path, kind: str, key: str = "text") -> list[Document | BadRecord]:
    return list(documents_of(path, Source("docs", str(path.parent), kind, "*", ()), key))


def kinds(found: list[Document | BadRecord]) -> list[str]:
    return [one.kind if isinstance(one, BadRecord) else one.text for one in found]


@pytest.mark.parametrize(
    ("raw", "expected"),
    [(b"text\n", "text\n"), (b" \n", "empty"), (b"", "empty"), (b"a\0b", "binary"), (b"\xff\xfe", "binary")],
)
def test_files_of_text(raw: bytes, expected: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(raw)
    assert kinds(read(tmp_path / "a.txt", "text")) == [expected]


LINES = [
    '{"body": "one", "id": "first"}',
    "",
    '{"body": "two"}',
    "{broken",
    '["no object"]',
    '{"text": "other key"}',
    '{"body": 7}',
    '{"body": "  "}',
    '{"body": "half \\ud800"}',
    '{"body": "last \\ud83d\\ude00"}',
]


@pytest.mark.parametrize("packed", [False, True])
def test_lines_of_json(packed: bool, tmp_path: Path) -> None:
    path = tmp_path / ("a.jsonl.gz" if packed else "a.jsonl")
    raw = "\n".join(LINES).encode()
    path.write_bytes(gzip.compress(raw) if packed else raw)
    found = read(path, "jsonl", "body")
    assert kinds(found) == ["one", "two", "broken", "broken", "broken", "broken", "empty", "broken", "last \U0001f600"]
    assert [one.id for one in found if isinstance(one, Document)] == [
        "first",
        f"docs/{path.name}#3",
        f"docs/{path.name}#10",
    ]
    broken = [one for one in found if isinstance(one, BadRecord)]
    assert broken[0].where == f"{path}:4"
    assert "found: text" in broken[2].why


def test_a_packed_file_that_is_cut_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"{number} " * 2000}) for number in range(50)]
    whole = gzip.compress("\n".join(lines).encode(), 1)
    (tmp_path / "a.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    found = kinds(read(tmp_path / "a.jsonl.gz", "jsonl"))
    assert found[-1] == "broken"
    assert all(one.startswith(f"{number} ") for number, one in enumerate(found[:-1]))


def test_rows_of_parquet(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    columns = {"text": ["one", "", "two", None], "id": ["a", "b", "c", "d"], "stars": [1, 2, 3, 4]}
    parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    found = read(tmp_path / "a.parquet", "parquet")
    assert kinds(found) == ["one", "empty", "two", "empty"]
    assert [one.id for one in found if isinstance(one, Document)] == ["a", "c"]
    assert "found: text, id, stars" in read(tmp_path / "a.parquet", "parquet", "body")[0].why  # type: ignore[union-attr]
    del columns["id"]
    parquet.write_table(pyarrow.table(columns), tmp_path / "b.parquet")
    assert read(tmp_path / "b.parquet", "parquet")[0].id == "docs/b.parquet#1"  # type: ignore[union-attr]
    (tmp_path / "c.parquet").write_bytes(b"no table")
    assert kinds(read(tmp_path / "c.parquet", "parquet")) == ["broken"]


@pytest.mark.slow
def test_pages_of_archives(tmp_path: Path) -> None:
    from warcio.statusandheaders import StatusAndHeaders
    from warcio.warcwriter import WARCWriter

    path = tmp_path / "a.warc.gz"
    with path.open("wb") as stream:
        writer = WARCWriter(stream, gzip=True)
        for kind, body in (("text/html; charset=utf-8", PAGE), ("image/png", "picture"), ("text/html", " ")):
            headers = StatusAndHeaders("200 OK", [("Content-Type", kind)], protocol="HTTP/1.0")
            payload = io.BytesIO(body.encode())
            writer.write_record(writer.create_warc_record("http://a.b/", "response", payload, http_headers=headers))
        plain = io.BytesIO(b"Plain words of a page.")
        writer.write_record(writer.create_warc_record("http://a.b/c", "conversion", plain))
    found = kinds(read(path, "warc"))
    assert "deep enough for ships" in found[0]
    assert "<p>" not in found[0]
    assert "menu" not in found[0]
    assert found[1:] == ["empty", "Plain words of a page."]
    (tmp_path / "b.warc.gz").write_bytes(b"no archive")
    assert kinds(read(tmp_path / "b.warc.gz", "warc")) == ["broken"]


def response(encoding: str, content: bytes) -> bytes:
    """Return a record of WARC with a page whose content is packed."""
    page = f"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Encoding: {encoding}\r\n\r\n".encode() + content
    head = f"WARC/1.0\r\nWARC-Type: response\r\nWARC-Target-URI: http://a/\r\nContent-Length: {len(page)}\r\n\r\n"
    return head.encode() + page + b"\r\n\r\n"


@pytest.mark.slow
def test_pages_whose_text_is_costly_to_find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is a broken record, and nothing behind the third is read: each takes the whole time again."""
    extractors = pytest.importorskip("datatrove.pipeline.extractors")
    warcwriter = pytest.importorskip("warcio.warcwriter")
    from warcio.statusandheaders import StatusAndHeaders

    def extract(_: object, page: str) -> str:
        if "damaged" in page:
            raise RecursionError("too deep\nfor this")
        if "costly" in page:
            time.sleep(999)
        return page

    monkeypatch.setattr(extractors.Trafilatura, "extract", extract)
    monkeypatch.setattr(template_limits, "_GRACE", 0.5)
    monkeypatch.setattr(readers, "LimitedFunction", partial(LimitedFunction, seconds=0.2))
    with (tmp_path / "a.warc").open("wb") as file:
        writer = warcwriter.WARCWriter(file, gzip=False)
        for name in ("damaged", "costly", "good", "costly", "costly", "unread"):
            headers = StatusAndHeaders("200 OK", [("Content-Type", "text/html")], protocol="HTTP/1.0")
            payload = io.BytesIO(name.encode())
            writer.write_record(writer.create_warc_record("http://a/", "response", payload, http_headers=headers))
    found = [one.why if isinstance(one, BadRecord) else one.text for one in read(tmp_path / "a.warc", "warc")]
    costly = "a page whose text takes more than 20 s or 1,024 MiB to find"
    assert found[0] == "its text cannot be found (too deep for this)"
    assert found[1:5] == [costly, "good", costly, costly]
    assert found[5:] == ["not a WARC file (3 pages are too costly: nothing behind them is read)"]


@pytest.mark.slow
def test_archives_have_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A damaged or hostile record is counted; the records before it are kept."""
    path = tmp_path / "a.warc.gz"
    good, words = response("identity", b"words of a page"), "words of a page"

    def found(content: bytes) -> list[str]:
        path.write_bytes(content)
        return [record.why if isinstance(record, BadRecord) else record.text for record in read(path, "warc")]

    assert found(gzip.compress(good) * 3) == found(gzip.compress(good * 3)) == [words] * 3
    assert found(gzip.compress(response("gzip", gzip.compress(b"packed")) + good)) == ["packed", words]
    assert found(gzip.compress(response("br", b"x") + good))[1:] == [words]
    assert "cut short" in found(gzip.compress(good)[:-9])[-1]
    for headers in (b"X: " + b"a" * (2 << 20), b"X: a\r\n" * (1 << 19)):
        assert "the headers of a record have more than 1 MiB" in found(gzip.compress(b"WARC/1.0\r\n" + headers))[0]
    assert "the headers of a record" in found(gzip.compress(good + b"\r\n" * (1 << 20)))[1]
    page = response("identity", b"<p>word</p>" * 500_000).replace(b"text/plain", b"text/html")
    assert found(gzip.compress(page + good)) == ["a page of more than 4 MiB of HTML", words]
    monkeypatch.setattr(records, "MOST_UNPACKED", 500_000)
    monkeypatch.setattr(records, "MOST_RATIO", 1)
    request = b"WARC/1.0\r\nWARC-Type: metadata\r\nContent-Length: %d\r\n\r\n%b\r\n\r\n" % (400_000, b"a" * 400_000)
    assert found(gzip.compress(good + request)) == [words]
    assert "unpacks to more than" in found(gzip.compress(good + request * 2))[-1]
    assert all("\n" not in why and "\x1b" not in why for why in found(b"\x1b[31m none\n" * 9))


def recipe_of(tmp_path: Path, on_bad: str = "skip") -> Recipe:
    docs = folder_of(tmp_path, "docs", {"a.txt": "one", "b.txt": "two", "c.txt": "", "d.txt": "three"})
    (tmp_path / "more.jsonl").write_text('{"text": "four"}\n{\n')
    more = Source("more", str(tmp_path / "more.jsonl"), "jsonl", "*", ())
    return Recipe((docs, more), tasks=3, on_bad=on_bad)


def test_files_are_dealt_to_tasks_and_counted(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path)
    found = run_steps([Collect(recipe, tmp_path / "tallies")], recipe.tasks)
    assert sorted(one.text for one in found) == ["four", "one", "three", "two"]  # type: ignore[attr-defined]
    counts = told(tmp_path).counts
    assert counts == {"docs": {"read": 3, "empty": 1}, "more": {"read": 1, "broken": 1}}
    assert told(tmp_path).num_bytes["docs"]["read"] == 11
    assert {one.metadata["source"] for one in found} == {"docs", "more"}  # type: ignore[attr-defined]
