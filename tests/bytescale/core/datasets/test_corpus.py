"""``bytescale corpus``: from files to a data set that Megatron reads."""

import argparse
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from bytescale_ext.data.corpus.sidecar import check_weights, open_sidecar, weights_of
from bytescale_ext.data.samples import sources as sources_of_corpus
from bytescale_ext.data.samples.lengths import check_indexed_dataset, check_token_ids
from megatron.bytescale.cli import corpus as cli
from megatron.bytescale.core.datasets import corpus


def _run(*argv: object) -> int:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    return cli.run(parser.parse_args([str(word) for word in argv]))


def _documents(prefix: Path) -> list[bytes]:
    """Return the documents of a byte-level data set, without their end token."""
    data = IndexedDataset(str(prefix))
    documents = [data[i] for i in range(len(data))]
    assert all(document[-1] == 256 and (document[:-1] < 256).all() for document in documents)
    return [document[:-1].astype(np.uint8).tobytes() for document in documents]


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    root = tmp_path / "in"
    (root / "sub").mkdir(parents=True)
    (root / ".git").mkdir()
    (root / ".git" / "config.py").write_text("hidden")
    (root / "b.py").write_text("print('grüße')\n", encoding="utf-8")
    (root / "sub" / "a.py").write_bytes(b"\xff\x00not utf-8")
    (root / "empty.py").write_text("")
    lines = ['{"text": "one"}', "", '{"text": "", "n": 1}', '{"text": "two\\nlines", "id": 7}']
    (root / "c.jsonl").write_text("\n".join(lines) + "\n")
    return root


def test_a_file_or_a_line_is_a_document(tmp_path: Path, sources: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "out"
    assert _run("--output", out, "--from", sources) == 0
    expected = ["print('grüße')\n".encode(), b"one", b"two\nlines", b"\xff\x00not utf-8"]
    assert _documents(out) == expected
    info = check_indexed_dataset(str(out))
    assert (info.num_documents, info.num_tokens) == (4, sum(map(len, expected)) + 4)
    assert info.dtype == np.dtype("uint16")
    assert check_token_ids(str(out), 257) == info.num_tokens
    text = capsys.readouterr().out
    assert "documents  4" in text
    assert "skipped    2 empty" in text
    assert "files      4" in text
    assert f"--data-path {out} --tokenizer-type NullTokenizer --vocab-size 257" in text
    assert sorted(path.name for path in out.parent.iterdir()) == ["out.bin", "out.idx"]


def test_tokens_cut_a_shuffled_corpus_the_same_way_each_time(tmp_path: Path) -> None:
    root = tmp_path / "in"
    root.mkdir()
    for i in range(50):
        (root / f"{i:02}.txt").write_text(f"{i:02}" * 10)
    (root / "z.jsonl").write_text("".join(json.dumps({"text": f"line {i}"}) + "\n" for i in range(50)))
    cuts = {}
    for name, seed in (("a", 1), ("again", 1), ("other", 2)):
        _run("--output", tmp_path / name, "--from", root, "--tokens", 200, "--seed", seed)
        cuts[name] = _documents(tmp_path / name)
    assert cuts["a"] == cuts["again"] != cuts["other"]
    assert (tmp_path / "a.bin").read_bytes() == (tmp_path / "again.bin").read_bytes()
    sizes = [len(document) + 1 for document in cuts["a"]]
    assert sum(sizes) >= 200 > sum(sizes[:-1])
    assert len(set(cuts["a"])) == len(cuts["a"])
    assert any(document.startswith(b"line") for document in cuts["a"])
    _run("--output", tmp_path / "all", "--from", root)
    everything = _documents(tmp_path / "all")
    assert len(everything) == 100
    assert set(cuts["a"]) < set(everything)
    assert everything[50:] == [f"line {i}".encode() for i in range(50)]


def test_a_megatron_tokenizer_by_its_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in.jsonl").write_text('{"ids": "5 6 7"}\n{"ids": "8"}\n')
    _run(
        *("--output", tmp_path / "out", "--from", tmp_path / "in.jsonl", "--json-key", "ids"),
        *("--tokenizer-type", "NullTokenizer", "--vocab-size", 100_000),
    )
    data = IndexedDataset(str(tmp_path / "out"))
    assert [data[i].tolist() for i in range(2)] == [[5, 6, 7, 99_999], [8, 99_999]]
    assert check_indexed_dataset(str(tmp_path / "out")).dtype == np.dtype("int32")
    assert "--tokenizer-type NullTokenizer --vocab-size 100000" in capsys.readouterr().out


def test_weights_lie_beside_the_tokens(tmp_path: Path) -> None:
    lines = ['{"text": "ab", "w": [0.5, -1]}', '{"text": "", "w": 2}', '{"text": "c", "w": 3}']
    (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n")
    _run("--output", tmp_path / "out", "--from", tmp_path / "in.jsonl", "--weights", "w")
    assert check_weights(str(tmp_path / "out")).num_nonzero == 4
    assert open_sidecar(weights_of(str(tmp_path / "out"))).tolist() == [0.5, -1.0, 0.0, 3.0, 3.0]


def test_text_that_is_not_utf8_is_replaced_and_counted_for_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"a\xffb")
    (tmp_path / "b.txt").write_text("a\ufffdb", encoding="utf-8")
    (tmp_path / "c.jsonl").write_text('{"text": "\\ud800"}\n')
    tokenizer = SimpleNamespace(vocab_size=1 << 17, eod=0, tokenize=lambda text: [ord(letter) for letter in text])
    entries = sources_of_corpus.source_entries([str(tmp_path)], "*")
    summary = corpus.write_corpus(str(tmp_path / "out"), entries, tokenizer=tokenizer)
    data = IndexedDataset(str(tmp_path / "out"))
    assert data[0].tolist() == data[1].tolist() == [97, 0xFFFD, 98, 0]
    assert summary.num_not_utf8 == 2
    assert summary.num_documents == 3
    summary = corpus.write_corpus(str(tmp_path / "bytes"), entries)
    data = IndexedDataset(str(tmp_path / "bytes"))
    assert data[0].tolist() == [97, 255, 98, 256]
    assert summary.num_not_utf8 == 2


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--from", "{in}/none"], "none: no such file or folder"),
        (["--from", "{in}", "--glob", "*.cpp"], r"in: no file below matches '\*\.cpp'"),
        (["--from", "{in}/empty.py"], "all of them empty"),
        (["--from", "{in}/c.jsonl", "--json-key", "body"], r"c\.jsonl:1: no text under the key 'body' .*'text'"),
        (["--from", "{in}/bad.jsonl"], r"bad\.jsonl:2: not JSON"),
        (["--from", "{in}/list.jsonl"], r"list\.jsonl:1: no text under the key 'text' \(found: list\)"),
        (["--from", "{in}/bytes.jsonl"], r"bytes\.jsonl:1: not JSON"),
        (
            ["--from", "{in}/c.jsonl", "--weights", "n"],
            r"c\.jsonl:1: no number and no list of numbers under the key 'n'",
        ),
        (["--from", "{in}/c.jsonl", "--weights", "text"], "no number and no list of numbers under the key 'text'"),
        (["--from", "{in}/b.py", "--weights", "w"], r"b\.py: weights are fields of records of JSON files"),
        (["--from", "{in}", "--vocab-size", "300"], "vocab_size without a tokenizer"),
        (["--from", "{in}/b.py", "--tokenizer-type", "Nonsense"], "Nonsense is not supported"),
        (["--from", "{in}/b.py", "--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", "{in}/v"], "v: no such file"),
        (
            ["--from", "{in}/b.py", "--tokenizer-type", "GPT2BPETokenizer"],
            "needs --vocab-file and --merge-file: without the files Megatron downloads",
        ),
        (
            ["--from", "{in}/b.py", "--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", "{in}/b.py"],
            "GPT2BPETokenizer needs --merge-file: without",
        ),
        (["--from", "{in}/b.py", "--tokenizer-type", "BertWordPieceCase"], "BertWordPieceCase needs --vocab-file: "),
        (
            ["--from", "{in}/b.py", "--tokenizer-type", "NullTokenizer"],
            "--tokenizer-type NullTokenizer needs --vocab-size",
        ),
    ],
)
def test_bad_input_is_named_and_leaves_nothing(tmp_path: Path, sources: Path, argv: list[str], message: str) -> None:
    bad = tmp_path / "bad"
    bad.mkdir()
    (sources / "bad.jsonl").write_text('{"text": "fine"}\n{"text": \n')
    (sources / "list.jsonl").write_text("[1]\n")
    (sources / "bytes.jsonl").write_bytes(b'{"text": "\xff"}\n')
    with pytest.raises(ValueError, match=message):
        _run("--output", bad / "out", *(word.replace("{in}", str(sources)) for word in argv))
    assert not list(bad.iterdir())


def test_a_failed_run_leaves_the_old_data_set(tmp_path: Path, sources: Path) -> None:
    out = tmp_path / "out"
    _run("--output", out, "--from", sources)
    before = _documents(out)
    (sources / "z.jsonl").write_text("{")
    with pytest.raises(ValueError, match="not JSON"):
        _run("--output", out, "--from", sources)
    assert _documents(out) == before
    (sources / "z.jsonl").unlink()
    _run("--output", out, "--from", sources, "--glob", "b.py")
    assert len(_documents(out)) == 1
    assert not list(tmp_path.glob(".*"))


def test_a_run_ended_while_the_index_is_written_changes_nothing(
    tmp_path: Path, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    _run("--output", out, "--from", sources)
    before = (tmp_path / "out.bin").read_bytes(), (tmp_path / "out.idx").read_bytes()

    def killed(self: object, idx_path: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(corpus.IndexedDatasetBuilder, "finalize", killed)
    with pytest.raises(KeyboardInterrupt):
        _run("--output", out, "--from", sources, "--glob", "b.py")
    assert ((tmp_path / "out.bin").read_bytes(), (tmp_path / "out.idx").read_bytes()) == before
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    ("kind", "files"),
    [
        ("TikTokenizer", {"tokenizer_model": "["}),
        ("HuggingFaceTokenizer", {"tokenizer_model": "[", "metadata_path": '{"tokenizer_class": "x"}'}),
        ("HuggingFaceTokenizer", {"tokenizer_model": "[", "metadata_path": "[]"}),
    ],
)
def test_damaged_tokenizers_end_in_one_line(kind: str, files: dict[str, str], tmp_path: Path) -> None:
    settings: dict[str, object] = {"tokenizer_type": kind, "vocab_size": 100}
    for name, content in files.items():
        (tmp_path / name).write_text(content)
        settings[name] = str(tmp_path / name)
    with pytest.raises(ValueError, match=rf"^{kind}: Megatron cannot build it \(.+\)|not JSON|Expecting"):
        corpus.build_megatron_tokenizer(settings)
