"""``bytescale data sculpt``: its report, its files, and an unchanged corpus."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import numpy as np
import pytest

from bytescale_ext.data.corpus.tokens import open_tokens
from bytescale_ext.data.corpus.windows_file import load_windows, sha256_of
from bytescale_ext.plan.sculpt.check import check_windows
from bytescale_ext.plan.sculpt.pieces import OVERFLOWS, window_bounds
from megatron.bytescale import cli
from megatron.bytescale.cli.data import command
from tests.data.corpus.books import texts, write_texts

CONTEXT = 1000


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    write_texts(tmp_path / "docs", texts()[0])
    return tmp_path / "docs"


def sculpt(source: Path, out: Path, *words: object) -> int:
    options = ["--input", source, "--seq-length", CONTEXT, "--output", out, *words]
    return cli.main([command.NAME, command.sculpt.NAME, *map(str, options)])


@pytest.mark.slow
@pytest.mark.parametrize("overflow", OVERFLOWS)
def test_the_report_and_the_files(
    overflow: str, prefix: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = [Path(f"{prefix}{suffix}").read_bytes() for suffix in (".bin", ".idx")]
    assert sculpt(prefix, tmp_path / "out" / "a", "--overflow", overflow, "--json", "--seed", 7) == 0
    report = json.loads(capsys.readouterr().out)
    path = tmp_path / "out" / "a.windows.npy"
    table, header = load_windows(path)
    corpus = open_tokens(str(prefix))
    check_windows(table, corpus.lengths, CONTEXT, overflow)
    assert (header.context, header.overflow, header.seed) == (CONTEXT, overflow, 7)
    assert header.idx_sha256 == sha256_of(f"{prefix}.idx")
    assert report["windows"] == str(path)
    assert report["num_windows"] == table["window"][-1] + 1
    assert report["fill"] == pytest.approx(table["length"].sum() / report["num_windows"] / CONTEXT)
    assert (report["documents"], report["tokens"]) == (len(corpus.lengths), corpus.lengths.sum())
    assert report["relevance"] > 1.5 * report["random_relevance"]
    assert [Path(f"{prefix}{suffix}").read_bytes() for suffix in (".bin", ".idx")] == before
    assert sorted(one.name for one in path.parent.iterdir()) == ["a.windows.json", "a.windows.npy"]


@pytest.mark.slow
def test_the_report_as_text(prefix: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sculpt(prefix, tmp_path / "a", "--plot", tmp_path / "map.png") == 0
    lines = capsys.readouterr().out.splitlines()
    path = tmp_path / "a.windows.npy"
    assert lines[0] == str(path)
    assert [line.split()[0] for line in lines[1:-1]] == [
        "documents", "windows", "inside", "cut", "clusters", "seconds",
    ]  # fmt: skip
    assert "0.0% of the documents that fit, tokens kept 100.0%" in lines[4]
    assert lines[-1] == f"train with --data-path {prefix} --sculpt-windows {path} --seq-length {CONTEXT}"
    assert (tmp_path / "map.png").exists()


@pytest.mark.slow
def test_windows_as_documents_of_a_new_data_set(prefix: Path, tmp_path: Path) -> None:
    assert sculpt(prefix, tmp_path / "a", "--materialise") == 0
    corpus, windows = open_tokens(str(prefix)), open_tokens(str(tmp_path / "a.windows"))
    table, _ = load_windows(tmp_path / "a.windows.npy")
    bounds = window_bounds(table)
    assert len(windows.lengths) == len(bounds) - 1
    assert windows.tokens.dtype == corpus.tokens.dtype
    for window in (0, len(bounds) - 2):
        rows = table[bounds[window] : bounds[window + 1]]
        expected = np.concatenate([corpus.read(*row) for row in rows[["document", "start", "length"]].tolist()])
        assert windows.read(window, 0, int(windows.lengths[window])).tolist() == expected.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["in.jsonl", "in.ndjson.xz", "in.json", "in"])
def test_text_becomes_a_data_set_first(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made, _ = texts(30)
    source, rows = tmp_path / name, [{"body": text} for text in made]
    raw = json.dumps(rows) if name == "in.json" else "".join(json.dumps(row) + "\n" for row in rows)
    source.write_bytes(lzma.compress(raw.encode()) if name.endswith(".xz") else raw.encode())
    assert sculpt(source, tmp_path / "a", "--json-key", "body") == 0
    corpus = open_tokens(str(tmp_path / "a"))
    assert corpus.lengths.tolist() == [len(text) + 1 for text in made]
    assert load_windows(tmp_path / "a.windows.npy")[1].idx_sha256 == sha256_of(tmp_path / "a.idx")
    assert f"--data-path {tmp_path / 'a'} " in capsys.readouterr().out


def test_a_text_is_no_corpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in.txt").write_text("one text")
    assert sculpt(tmp_path / "in.txt", tmp_path / "a") == 2
    assert "in.txt: neither a data set nor a file of JSON or Parquet with documents" in capsys.readouterr().err


@pytest.mark.slow
def test_several_data_sets_and_an_interrupted_run(
    prefix: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_texts(tmp_path / "more", texts(60, seed=3)[0])
    (tmp_path / "mixture").write_text(f"0.5 {prefix}\n0.5 {tmp_path / 'more'}\n")
    options = ["--mixture", tmp_path / "mixture", "--seq-length", CONTEXT, "--output", tmp_path / "both"]
    (tmp_path / "both.windows.work").mkdir()
    (tmp_path / "both.windows.work" / "settings").write_text("of other windows")
    call = [command.NAME, command.sculpt.NAME, *map(str, options), "--concurrent-tasks", "1", "--tasks", "2", "--json"]
    assert cli.main(call) == 2
    assert "both.windows.work: unfinished work with other options" in capsys.readouterr().err
    (tmp_path / "both.windows.work" / "settings").unlink()
    assert cli.main(call) == 0
    report = json.loads(capsys.readouterr().out)
    corpus = open_tokens(str(tmp_path / "both"))
    total = sum(int(open_tokens(str(one)).lengths.sum()) for one in (prefix, tmp_path / "more"))
    assert report["tokens"] == corpus.lengths.sum() == pytest.approx(total, rel=0.2)
    check_windows(load_windows(tmp_path / "both.windows.npy")[0], corpus.lengths, CONTEXT, "none")
    assert not (tmp_path / "both.windows.work").exists()
