"""``bytescale corpus``: its output, the training flags that it suggests, and refused input."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from bytescale_ext.data.samples.lengths import check_indexed_dataset
from megatron.bytescale import cli

LINES = ['{"text": "one"}', "", '{"text": "", "n": 1}', '{"text": "two\\nlines", "body": "ü"}']


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.py").write_text("1234")
    (folder / "b.txt").write_bytes(b"\xff2")
    (folder / "c.jsonl").write_text("\n".join(LINES) + "\n")
    return folder


def corpus(out: Path, *words: object) -> int:
    return cli.main(["corpus", "--output", str(out), *map(str, words)])


def test_the_report(tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "out"
    assert corpus(out, "--from", source) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{out}.bin, {out}.idx (uint16)",
        "documents  4",
        "tokens     22",
        "length     median 5  p90 10  p99 10  max 10",
        "files      3",
        "skipped    1 empty",
        "not UTF-8  1 (each byte is a token)",
        f"train with --data-path {out} --tokenizer-type NullTokenizer --vocab-size 257",
    ]
    assert sorted(path.name for path in out.parent.iterdir()) == ["out.bin", "out.idx"]
    assert check_indexed_dataset(str(out)).num_tokens == 22


def test_fewer_tokens_than_asked_for_are_told(tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus(tmp_path / "out", "--from", source, "--tokens", 1_000_000)
    assert "           fewer than --tokens 1,000,000: the source has no more\n" in capsys.readouterr().out
    corpus(tmp_path / "out", "--from", source, "--tokens", 10)
    assert "fewer than" not in capsys.readouterr().out


def test_the_python_files_of_the_environment_are_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from bytescale_ext.data.samples import sources as written

    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "one.py").write_text("1")
    (tmp_path / "lib" / "two.txt").write_text("22")
    paths = dict.fromkeys(("stdlib", "purelib", "platlib"), str(tmp_path / "lib"))
    monkeypatch.setattr(written.sysconfig, "get_paths", lambda: paths)
    monkeypatch.setattr(written, "_in_packages", lambda path: True)
    for words, num_tokens in (((), 2), (("--glob", "*.txt"), 3), (("--from", tmp_path / "lib"), 5)):
        corpus(tmp_path / "out", *words, "--json")
        assert json.loads(capsys.readouterr().out)["num_tokens"] == num_tokens


def test_the_flags_of_the_tokenizer_are_those_of_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in.jsonl").write_text('{"ids": "5 6 7"}\n{"ids": "8"}\n')
    flags = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "100000"]
    words = ["--from", tmp_path / "in.jsonl", "--json-key", "ids", *flags]
    assert corpus(tmp_path / "out", *words) == 0
    *_, not_utf8, trained = capsys.readouterr().out.splitlines()
    assert not_utf8 == "not UTF-8  0 (bad bytes replaced)"
    assert shlex.split(trained.removeprefix("train with ")) == ["--data-path", str(tmp_path / "out"), *flags]
    assert check_indexed_dataset(str(tmp_path / "out")).num_tokens == 6


def test_records_that_are_too_long_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("bytescale_ext.data.samples.records.MOST_BYTES", 100)
    (tmp_path / "in.jsonl").write_text('{"text": "one"}\n{"text": "' + "x" * 200 + '"}\n{"text": "two"}\n')
    assert corpus(tmp_path / "out", "--from", tmp_path / "in.jsonl") == 0
    assert "skipped    0 empty, 1 of more than 128 MiB\n" in capsys.readouterr().out
    assert check_indexed_dataset(str(tmp_path / "out")).num_tokens == 8


def test_ids_that_the_file_cannot_hold_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "5 6"}\n{"text": "70000"}\n')
    flags = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "1000"]
    assert corpus(tmp_path / "out", "--from", tmp_path / "in.jsonl", *flags) == 2
    assert "in.jsonl:2: the tokenizer gives the token id 70000, and the file holds ids of type uint16" in (
        capsys.readouterr().err
    )
    assert not (tmp_path / "out.idx").exists()


def test_json_that_is_taken_as_text_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "in\x1b[31m.txt").write_text('{"text": "one"}\n')
    assert corpus(tmp_path / "out", "--from", tmp_path / "in") == 0
    error = capsys.readouterr().err
    assert "in\\x1b[31m.txt begins like JSON and is taken as one text" in error
    assert "\x1b" not in error
