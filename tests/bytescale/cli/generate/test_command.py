"""``bytescale generate`` from the command line: text, JSON, files of prompts, and bad input."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
from pathlib import Path

import pytest

from megatron.bytescale import cli
from megatron.bytescale.cli.generate.command import lines_of
from tests.e2e.drafts import ONE, heads_of
from tests.harness import run_ranks

LINES = {
    "text": ["--prompt", "0123"],
    "json": ["--prompt", "0123", "--json"],
    "plain": ["--prompt", "0123", "--json", "--plain"],
    "file": ["--prompts", "{in}/texts", "--json", "--temperature", "1.5", "--chain"],
    "one by one": ["--prompts", "{in}/texts", "--json", "--batch", "1"],
    "together": ["--prompts", "{in}/texts", "--json"],
    "texts": ["--prompts", "{in}/texts"],
    "again": ["--prompts", "{in}/texts", "--json", "--temperature", "1.5", "--chain"],
    "too long": ["--prompt", "0" * 250],
    "letter": ["--prompt", "a"],
    "empty": ["--prompt", ""],
}

GENERATE = ["generate", "--load", "{in}", "--prompt", "x"]
BAD = [
    (["generate"], "required: --load"),
    (GENERATE[:3], "one of the arguments --prompt --prompts is required"),
    ([*GENERATE, "--prompts", "{in}/texts"], "not allowed with argument --prompt"),
    ([*GENERATE, "--temperature", "-1"], "--temperature -1 must be 0 or more"),
    ([*GENERATE, "--tree-tokens", "257"], "--tree-tokens 257: give 1 to 256"),
    ([*GENERATE, "--top-p", "0"], "--top-p 0 must be above 0 and at most 1"),
    ([*GENERATE[:3], "--prompts", "{in}/none"], "--prompts .*none: No such file"),
]


@pytest.mark.parametrize(("words", "message"), BAD, ids=lambda value: "" if isinstance(value, str) else value[-1])
def test_bad_options(words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = tmp_path / "iter_0000001"
    checkpoint.mkdir()
    (checkpoint / ".metadata").touch()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("1")
    assert cli.main([word.replace("{in}", str(tmp_path)) for word in words]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert re.fullmatch(rf"bytescale generate: error: .*{message}.*\n", shown.err), shown.err


def run_lines(rank: int, world: int, folder: Path, load: Path) -> dict[str, tuple[int, str, str]]:
    """Return (exit code, output, errors) of each line in one process."""
    found = {}
    for name, words in LINES.items():
        out, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            line = ["generate", "--load", str(load), "--cpu", "--max-tokens", "8", *words]
            code = cli.main([word.replace("{in}", str(folder)) for word in line])
        found[name] = code, out.getvalue(), errors.getvalue()
    return found


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a file of prompts."""
    folder = tmp_path_factory.mktemp("prompts")
    (folder / "texts").write_text("01\n2345\n")
    return folder


@pytest.fixture(scope="module")
def alone(texts: Path) -> dict[str, tuple[int, str, str]]:
    """Return the output of a single process for each of the lines."""
    return run_ranks(run_lines, 1, texts, heads_of(1, *ONE).save, init_group=False)[0]


@pytest.mark.ranks
def test_what_it_prints(alone: dict[str, tuple[int, str, str]]) -> None:
    found = alone
    assert [found[name][0] for name in LINES] == [0] * 8 + [2] * 3
    drafted, plain = (json.loads(found[name][1]) for name in ("json", "plain"))
    assert drafted["tokens"] == plain["tokens"]
    assert plain["accepted"] == [0] * 7
    assert plain["target_forwards"] == 7 >= drafted["target_forwards"] == len(drafted["accepted"])
    assert drafted["tokens_per_second"] > 0
    assert found["text"][1] == bytes(drafted["tokens"]).decode("utf-8", "replace") + "\n"
    assert found["text"][2].startswith(f"1 text: 8 tokens in {drafted['target_forwards']} forward passes")
    assert found["file"][2].startswith("2 texts: 16 tokens in ")
    lines = [json.loads(line)["tokens"] for line in found["file"][1].splitlines()]
    assert [len(line) for line in lines] == [8, 8]
    assert lines == [json.loads(line)["tokens"] for line in found["again"][1].splitlines()]
    one_by_one, together = (list(map(json.loads, found[name][1].splitlines())) for name in ("one by one", "together"))
    for one, beside in zip(one_by_one, together, strict=True):
        assert one.keys() == {"tokens", "target_forwards", "accepted", "tokens_per_second"}
        assert all(one[name] == beside[name] for name in ("tokens", "target_forwards", "accepted"))
    written = b"".join(bytes(one["tokens"]).decode("utf-8", "replace").encode() + b"\n" for one in one_by_one)
    assert found["texts"][1].encode() == written
    for name, message in (
        ("too long", "a prompt of 250 tokens and --max-tokens 8 exceed the context of 256 tokens"),
        ("letter", "the prompt has the byte 97, and the vocabulary has 61 tokens"),
        ("empty", "the prompt is empty"),
    ):
        assert message in found[name][2]
        assert found[name][2].count("\n") == 1


def on_two_ranks(rank: int, world: int, folder: Path, load: Path) -> dict[str, tuple[int, str, str]]:
    """Return (exit code, output, errors) of lines of this rank. Invalid lines fail before processes connect."""
    found = {}
    for name in ("missing", "together"):
        os.environ["RANK"] = str(rank)
        out, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            line = ["generate", "--load", str(folder if name == "missing" else load), "--cpu", "--max-tokens", "8"]
            code = cli.main([*line, *(word.replace("{in}", str(folder)) for word in LINES["together"])])
        found[name] = code, out.getvalue(), errors.getvalue()
    return found


@pytest.mark.ranks
def test_the_first_of_two_ranks_prints(texts: Path, alone: dict[str, tuple[int, str, str]]) -> None:
    first, second = run_ranks(on_two_ranks, 2, texts, heads_of(1, *ONE).save)
    assert [found["missing"][0] for found in (first, second)] == [2, 2]
    assert first["missing"][2].count("\n") == 1
    assert second["missing"][1:] == second["together"][1:] == ("", "")
    tokens = [[json.loads(line)["tokens"] for line in found["together"][1].splitlines()] for found in (first, alone)]
    assert tokens[0] == tokens[1]


def test_lines_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "texts").write_text("one\ntwo three\n")
    assert lines_of(tmp_path / "texts") == ["one", "two three"]
    for bad in ("", "one\n\ntwo\n"):
        (tmp_path / "bad").write_text(bad)
        with pytest.raises(ValueError, match="give a text in each line"):
            lines_of(tmp_path / "bad")
    with pytest.raises(ValueError, match="No such file"):
        lines_of(tmp_path / "none")
    (tmp_path / "latin").write_bytes(b"\xe9")
    with pytest.raises(ValueError, match="can't decode"):
        lines_of(tmp_path / "latin")
