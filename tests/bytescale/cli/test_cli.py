"""Dispatcher of the console command. Other files test its subcommands."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron.bytescale import cli, train
from megatron.bytescale.arguments.renamed import RENAMED, TRAINING, Renamed
from megatron.bytescale.cli import train as command_of_train
from tests.sample import sampled

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("command", cli.COMMANDS[1:], ids=lambda command: command.NAME)
def test_help_has_an_example_that_parses(command: object, capsys: pytest.CaptureFixture[str]) -> None:
    name, example = command.NAME, command.EXAMPLE  # type: ignore[attr-defined]
    with pytest.raises(SystemExit) as end:
        cli.main([name, "--help"])
    assert end.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"example: {example}" in shown
    program, *words = example.split()
    assert program == "bytescale"
    assert words[0] == name
    assert cli.parser().parse_args(words).command == name


@pytest.mark.parametrize(
    ("row", "where"),
    [(row, where) for row in RENAMED if row.where != TRAINING for where in row.where.split(", ")],
    ids=lambda value: value if isinstance(value, str) else value.old,
)
def test_options_in_their_old_spelling(row: Renamed, where: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*where.split(), f"{row.old}=4"]) == 2
    assert capsys.readouterr().err == f"bytescale {where}: error: {row.old} is now {row.new}\n"
    with pytest.raises(SystemExit):
        cli.main([*where.split(), "--help"])
    options = set(re.findall(r"--[\w-]+", capsys.readouterr().out))
    assert row.new in options
    assert row.old not in options


def test_words_after_two_dashes_are_not_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["dry-run", "--ranks", "2", "--rank", "2", "--", "--world-size", "4"]) == 2
    assert "ranks are numbered from 0 to 1" in capsys.readouterr().err


def test_all_words_after_train_are_flags_of_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(train, "main", lambda: seen.append(sys.argv))
    assert command_of_train.NAME == "train"
    words = ["--num-layers", "2", "--help", "--version", "more", "--json"]
    assert cli.main(["train", *words]) == 0
    assert seen == [["pretrain_gpt_hdp.py", *words]]


def test_the_version_names_what_a_report_needs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["--version"])
    assert end.value.code == 0
    assert re.fullmatch(r"bytescale-megatron \d\S*, megatron-core 0\.19\.2, torch \d\S*\n", capsys.readouterr().out)


def test_a_full_device_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert cli.main(["schedule", "--pipeline-parallel", "2", "--micro-batches", "2"]) == 2
        monkeypatch.undo()
        with pytest.raises(OSError, match="No space left"):
            full.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())
    assert capsys.readouterr().err == "bytescale schedule: error: standard output: No space left on device\n"


def test_a_bug_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(args: argparse.Namespace) -> int:
        raise AssertionError("ours")

    monkeypatch.setattr(cli.doctor, "run", fail)
    with pytest.raises(AssertionError, match="ours"):
        cli.main(["doctor"])


def test_a_reader_that_has_seen_enough_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(args: argparse.Namespace) -> int:
        raise BrokenPipeError

    class Stream:
        closed = False

        def close(self) -> None:
            self.closed = True

    stream = Stream()
    monkeypatch.setattr(cli.doctor, "run", write)
    monkeypatch.setattr(sys, "stderr", stream)
    assert cli.main(["doctor"]) == 0
    assert stream.closed


LONG_TABLE = "schedule --pipeline-parallel 4 --micro-batches 64"


@pytest.mark.ranks
@pytest.mark.parametrize("line", sampled(["--help", "schedule --help", LONG_TABLE], [LONG_TABLE]))
def test_a_closed_pipe_ends_a_command_silently(line: str) -> None:
    """As ``| head -1`` does, if head has ended before the command writes."""
    code = "import sys; from megatron.bytescale.cli import main; sys.exit(main(sys.argv[1:]))"
    reading, writing = os.pipe()
    os.close(reading)
    words = [sys.executable, "-c", code, *line.split()]
    with open(writing, "wb") as pipe:
        ended = subprocess.run(words, cwd=ROOT, stdout=pipe, stderr=subprocess.PIPE, text=True, timeout=400)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.ranks
def test_commands_that_plan_import_neither_torch_nor_megatron(tmp_path: Path) -> None:
    np.save(tmp_path / "lengths.npy", np.array([30, 7, 55]))
    code = (
        "import sys; import megatron.bytescale.arguments.parse; from megatron.bytescale.cli import main, timeline; "
        "code = main('schedule --pipeline-parallel 2 --micro-batches 2'.split()) or main(['plan', *sys.argv[1:]]); "
        "heavy = sorted({name.split('.')[0] for name in sys.modules} & {'torch', 'matplotlib'}); "
        "heavy += [name for name in sys.modules if name.startswith(('megatron.core', 'megatron.training'))]; "
        "sys.exit(code or (f'imported {heavy}' if heavy else 0))"
    )
    words = ["--lengths", str(tmp_path / "lengths.npy"), "--ranks", "6", "--tokens-per-rank", "10"]
    ended = subprocess.run([sys.executable, "-c", code, *words], cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert ended.returncode == 0, ended.stderr
    assert "micro-batches per rank" in ended.stdout
