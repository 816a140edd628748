"""What names and files of others hold does not reach a terminal as control characters."""

from __future__ import annotations

import argparse
import io
import json
import sys
from pathlib import Path

import pytest

from bytescale_ext.terminal import EscapedStream, escape_output, stream_of_texts
from megatron.bytescale import cli
from megatron.bytescale.arguments.bad_input import write_error_file
from megatron.bytescale.cli.search.command import progress_bar
from tests.tree import text_of

ENTRIES = ("pretrain_gpt_hdp.py", "megatron/bytescale/launch.py", "megatron/bytescale/cli/__init__.py")
OBEYED = "\x1b[2J\x07\x9b\x7f\u202e\u2028\udcff"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_what_a_terminal_obeys_is_escaped() -> None:
    below = io.StringIO()
    print(f"a{OBEYED}b", "\u3000é\tc\r", file=EscapedStream(below))
    assert below.getvalue() == r"a\x1b[2J\x07\x9b\x7f\u202e\u2028\udcffb" + " \u3000é\tc\r\n"
    below.getvalue().encode()


def test_texts_are_escaped_on_a_terminal_only() -> None:
    for below, written in ((io.StringIO(), OBEYED[:3]), (Terminal(), r"\x1b[2")):
        stream_of_texts(EscapedStream(below)).write(OBEYED[:3])
        assert below.getvalue() == written


def test_a_progress_bar_moves_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    below = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", EscapedStream(below))
    with progress_bar("searching", shows=True) as bar:
        bar.add_task("first", total=1)
    assert "\x1b[" in below.getvalue()
    assert "\\x1b" not in below.getvalue()


@pytest.mark.parametrize("name", ENTRIES)
def test_programs_escape_their_output(name: str) -> None:
    assert "    escape_output()\n" in text_of(name) or "with escaped_output():" in text_of(name)


def test_a_command_escapes_what_it_prints(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def run(args: argparse.Namespace) -> int:
        print(f"wrote {OBEYED}")
        print(f"note {OBEYED}", file=sys.stderr)
        raise ValueError(OBEYED[:4])

    before = sys.stdout
    monkeypatch.setattr(cli.doctor, "run", run)
    assert cli.main(["doctor"]) == 2
    assert sys.stdout is before
    said = capsys.readouterr()
    assert said.out == r"wrote \x1b[2J\x07\x9b\x7f\u202e\u2028\udcff" + "\n"
    assert said.err.endswith("doctor: error: \\x1b[2J\n")
    assert (said.out + said.err).replace("\n", "").isprintable()


def test_a_name_of_a_corpus_is_one_word_of_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("text")
    output = tmp_path / "x\x1b[31m\n$(id)"
    assert cli.main(["corpus", "--from", str(tmp_path / "a.txt"), "--output", str(output)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(str(tmp_path / r"x\x1b[31m $(id).bin"))
    assert any(line.startswith("train with ") for line in lines)
    assert f"--data-path '{tmp_path}/x\\x1b[31m" in "\n".join(lines)


def test_the_reason_that_torchrun_prints_is_escaped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    write_error_file(f"bad {OBEYED}")
    assert json.loads((tmp_path / "error.json").read_text())["message"]["message"].isprintable()


def test_streams_are_wrapped_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.setattr(sys, "stderr", None)  # a program without a console
    escape_output()
    escape_output()
    assert isinstance(sys.stdout, EscapedStream)
    assert isinstance(sys.stdout.below, io.StringIO)
