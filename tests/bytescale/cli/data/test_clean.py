"""``bytescale data clean``: from files to a data set with a report, resumption, and refused input."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from bytescale_ext.data.corpus.tokens import open_tokens
from megatron.bytescale import cli
from megatron.bytescale.cli.data import clean, command
from tests.data.cleaning import folder_of, text


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    bodies = {f"{number}.txt": text(number % 5) + f"\nwrite to me{number}@corp.example.net" for number in range(6)}
    folder_of(tmp_path, "docs", bodies)
    return tmp_path / "docs"


def run(docs: Path, out: Path, *words: object) -> int:
    options = ["--input", f"docs={docs}", "--output", out, "--concurrent-tasks", 1, "--tasks", 1, *words]
    return cli.main([command.NAME, clean.NAME, *map(str, options)])


@pytest.mark.ranks
def test_the_report_and_the_files(docs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(docs, tmp_path / "out", "--tokenize", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    found = report["sources"]["docs"]
    assert (found["read"], found["exact"], found["near"], found["kept"]) == (6, 1, 0, 5)
    assert found["masked"] == 6
    assert sorted(one.name for one in (tmp_path / "out").iterdir()) == [
        "docs", "docs.bin", "docs.idx", "duplicates.jsonl", "report.json",
    ]  # fmt: skip
    shards = sorted((tmp_path / "out" / "docs").iterdir())
    lines = [json.loads(line) for shard in shards for line in shard.read_text().splitlines()]
    corpus = open_tokens(report["data_sets"][0]["prefix"])
    assert corpus.lengths.tolist() == [len(line["text"]) + 1 for line in lines]
    assert all("corp" not in line["text"] for line in lines)
    # The same call finds everything complete. A call with another recipe does not overwrite it.
    before = (tmp_path / "out" / "report.json").stat().st_mtime_ns
    assert run(docs, tmp_path / "out", "--tokenize") == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"docs, weight 1: {tmp_path / 'out' / 'docs'}"
    assert (tmp_path / "out" / "report.json").stat().st_mtime_ns == before
    assert run(docs, tmp_path / "out", "--jaccard", 0.5) == 2
    assert "it holds the output of another recipe" in capsys.readouterr().err


@pytest.mark.ranks
def test_weights_make_data_sets_of_their_own(docs: Path, tmp_path: Path) -> None:
    assert run(docs, tmp_path / "out", "--policy", "weight", "--steps", "exact", "near", "--tokenize") == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert [(one["name"], one["weight"]) for one in report["data_sets"]] == [("docs", 1.0), ("docs-x1.75", 1.75)]
    assert [len(open_tokens(one["prefix"]).lengths) for one in report["data_sets"]] == [4, 1]
    assert report["sources"]["docs"]["weight"] == 5.75


@pytest.mark.ranks
def test_a_run_that_failed_goes_on(docs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = docs / "6.txt"
    bad.write_bytes(b"\0")
    assert run(docs, tmp_path / "out", "--on-bad", "fail") == 2
    error = capsys.readouterr().err
    assert error.startswith("bytescale data clean: error: ")
    assert "6.txt: a byte of value 0: this is not text: fix it, or give --on-bad skip" in error
    assert [one.name for one in (tmp_path / "out").iterdir()] == [".work"]
    assert run(docs, tmp_path / "out") == 2  # another recipe
    assert "it holds unfinished work of another recipe" in capsys.readouterr().err
    link = tmp_path / "out" / ".work" / "stages" / "read" / "logs" / "task_00001.log"
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(bad)
    assert run(docs, tmp_path / "out", "--on-bad", "fail") == 2
    assert capsys.readouterr().err == f"bytescale data clean: error: {link}: is a link\n"
    assert bad.read_bytes() == b"\0"


@pytest.mark.slow
def test_bad_calls_are_one_line_before_any_work(
    docs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "mine.txt").write_text("mine")
    out = tmp_path / "out"
    code, recipe = tmp_path / "torch.py", tmp_path / "code.toml"
    code.write_text(f"open({str(tmp_path / 'it ran')!r}, 'w')\n")
    recipe.write_text(f"[[step]]\nuse = '{code}:x'\n")
    for words, message in (
        (("--recipe", recipe), f"step {code}:x: it can run code, download files or run without end, so read"),
        (("--steps", "near"), "near needs exact"),
        (("--concurrent-tasks", 0), "--concurrent-tasks 0: give 1 or more"),
        (("--executor", "slurm"), "--executor slurm needs a partition: give --slurm partition=P"),
        (("--slurm", "partition=a"), "need the --executor of the same name"),
        (("--tokenizer-type", "NullTokenizer", "--vocab-size", 9), "--tokenizer-type needs --tokenize"),
        (("--recipe", tmp_path / "none.toml"), "none.toml: No such file"),
        (("--output", full), "this folder has other files"),
        (("--input", f"own={full}", "--output", full / "new"), f"is inside the source {full}: give another folder"),
    ):
        assert run(docs, out, *words) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    assert not out.exists()
    assert not (tmp_path / "it ran").exists()
    assert run(docs, out, "--recipe", recipe, "--trust-recipe") == 2  # no function of this name
    assert (tmp_path / "it ran").exists()
    shutil.rmtree(out)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert run(docs, out) == 2
    assert "datatrove is needed: pip install 'bytescale-megatron[data]'" in capsys.readouterr().err


RECIPE = """
steps = ["filters", "exact", "near"]
on_bad = "skip"
filters = ["gopher-quality"]

[[source]]
name = "prose"
path = "{root}/prose.jsonl"

[[source]]
name = "code"
path = "{root}/code"
glob = "*.py"
filters = []
"""


@pytest.mark.ranks
def test_a_recipe_of_two_sources(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prose = [" ".join(["the harbour and that of the bay have ships", text(number)]) for number in range(3)]
    lines = [json.dumps({"text": one}) for one in [*prose, "too short"]]
    (tmp_path / "prose.jsonl").write_text("\n".join([*lines, "{broken"]))
    folder_of(tmp_path, "code", {"a.py": "x = 1", "b.py": prose[0], "c.md": "not taken"})
    (tmp_path / "recipe.toml").write_text(RECIPE.format(root=tmp_path))
    words = ["--recipe", tmp_path / "recipe.toml", "--output", tmp_path / "out", "--concurrent-tasks", 1]
    assert cli.main([command.NAME, clean.NAME, *map(str, words)]) == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())["sources"]
    assert report["prose"]["bad"] == {"broken": 1}
    assert report["prose"]["filtered"] == {"gopher-quality: gopher_short_doc": 1}
    assert report["code"]["read"] == 2  # its own filters: none
    assert report["prose"]["exact"] + report["code"]["exact"] == 1  # over both sources
    assert report["prose"]["kept"] + report["code"]["kept"] == 4
    printed = capsys.readouterr().out
    assert "prose: 1 broken, 1 gopher-quality: gopher_short_doc" in printed
    assert f"for example broken: {tmp_path / 'prose.jsonl'}:5: not JSON" in printed
    assert "code, weight 1: 1 shards" in printed
