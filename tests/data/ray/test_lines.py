"""Index of a JSONL file: lines with documents, and documents that are tokenized for it."""

import gzip
import json
import os
from pathlib import Path

import numpy as np
import pytest

from bytescale_ext.data.ray.lines import (
    MARK_TOKENS,
    LineIndex,
    chunks,
    index_file,
    index_lines,
    is_plain,
    join_indices,
    load_index,
    save_index,
    unpacked,
)
from bytescale_ext.data.samples.texts import encoder
from tests.data.text_files import LocalText, lengths_of, write_text

AS_BYTES = encoder(None)


def _index(path: Path, longest: int, chunk_bytes: int = 1 << 30) -> LineIndex:
    parts = chunks(str(path), chunk_bytes)
    return join_indices([index_lines(str(path), *part, "text", longest, AS_BYTES) for part in parts])


def _equal(a: LineIndex, b: LineIndex) -> bool:
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in a.__slots__)


def test_documents_are_the_lines_with_a_text_and_only_long_ones_are_counted(tmp_path: Path) -> None:
    path = write_text(tmp_path / "a.jsonl", 80)
    index = _index(path, longest=64)
    expected = lengths_of(LocalText(path, 64).documents)
    raw = path.read_bytes()
    assert len(index) == len(expected) > 50
    for offset, size in zip(index.offsets.tolist(), index.num_bytes.tolist(), strict=True):
        assert json.loads(raw[offset : offset + size])["text"]
    most = np.array(expected) - 1 + MARK_TOKENS
    assert index.is_counted.tolist() == (most > 64).tolist()
    assert 0 < index.is_counted.sum() < len(index)
    assert index.tokens.tolist() == np.where(most > 64, expected, most).tolist()


@pytest.mark.parametrize("seq_length", [16, 64, 1000])
def test_the_table_has_the_rows_of_the_true_lengths(tmp_path: Path, seq_length: int) -> None:
    from bytescale_ext.data.samples.lengths import sample_table

    path = write_text(tmp_path / "a.jsonl", 80)
    table = sample_table(_index(path, seq_length).table_lengths, seq_length)
    true = LocalText(path, seq_length).table
    assert table.document.tolist() == true.document.tolist()
    assert table.start.tolist() == true.start.tolist()


@pytest.mark.parametrize("chunk_bytes", [1, 7, 100, 1001])
def test_chunks_give_each_line_once(tmp_path: Path, chunk_bytes: int) -> None:
    path = write_text(tmp_path / "a.jsonl", 40)
    assert _equal(_index(path, 64, chunk_bytes), _index(path, 64))
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    assert _equal(_index(path, 64, chunk_bytes), _index(path, 64, chunk_bytes * 3))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"text": "cut', "not JSON"),
        ('{"body": "a"}', "no text under the key 'text' (found: ['body'])"),
        ('{"text": 3}', "no text under the key 'text'"),
        ("[1]", "found: list"),
    ],
)
@pytest.mark.parametrize("chunk_bytes", [1, 1 << 30])
def test_a_bad_line_is_named(tmp_path: Path, line: str, reason: str, chunk_bytes: int) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n\n{"text": "b"}\n' + line + '\n{"text": "c"}\n')
    with pytest.raises(ValueError, match=":4: ") as caught:
        _index(path, 64, chunk_bytes)
    assert str(caught.value).startswith(f"{path}:4: ")
    assert reason in str(caught.value)


def test_an_index_is_kept_until_anything_differs(tmp_path: Path) -> None:
    path = write_text(tmp_path / "a.jsonl", 20)
    name = str(tmp_path / "cache"), str(path), "text", 64, "bytes"
    file = index_file(*name)
    assert load_index(file) is None
    save_index(file, _index(path, 64))
    kept = load_index(index_file(*name))
    assert kept is not None
    assert _equal(kept, _index(path, 64))
    assert [entry.name for entry in file.parent.iterdir()] == [file.name]
    others = [
        index_file(*name[:2], "body", 64, "bytes"),
        index_file(*name[:3], 65, "bytes"),
        index_file(*name[:4], "x"),
    ]
    os.utime(path, ns=(0, 0))
    others.append(index_file(*name))
    assert len({file, *others}) == 5
    file.write_bytes(file.read_bytes()[:50])
    assert load_index(file) is None
    file.unlink()
    os.mkfifo(file)  # numpy would wait for a writer
    assert load_index(file) is None


def test_packed_files_and_other_kinds_are_unpacked_once(tmp_path: Path) -> None:
    path = write_text(tmp_path / "a.jsonl", 40)
    expected = [line for line in path.read_bytes().split(b"\n") if line]
    documents = [json.loads(line) for line in expected]
    packed, other = tmp_path / "b.jsonl.gz", tmp_path / "c.json"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    other.write_text(json.dumps(documents))
    assert is_plain(path, "text")
    for source in (packed, other):
        assert not is_plain(source, "text")
        file, left_out = unpacked(str(tmp_path / "cache"), source, "text")
        assert left_out == 0
        assert [json.loads(line) for line in file.read_bytes().split(b"\n") if line] == documents
        before = file.stat().st_mtime_ns
        assert unpacked(str(tmp_path / "cache"), source, "text") == (file, 0)
        assert file.stat().st_mtime_ns == before
        assert len(_index(file, 64)) == len(_index(path, 64))
    packed.write_bytes(packed.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"b\.jsonl\.gz: cannot be unpacked"):
        unpacked(str(tmp_path / "cache"), packed, "text")
    (tmp_path / "d.txt").write_text("text")
    with pytest.raises(ValueError, match=r"d\.txt: --hdp-loader ray reads files of JSON and Parquet"):
        is_plain(tmp_path / "d.txt", "text")
