"""``bytescale data mix``: the file that Megatron reads, the table, and small runs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bytescale_ext.data.clean.report import Report, SourceReport, save_report
from megatron.bytescale import cli
from megatron.bytescale.cli.data import command, mix, proxy
from tests.data.sources import write_data_set

LENGTHS = {"books": [300, 200, 100], "chats": [10] * 20}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, lengths in LENGTHS.items():
        write_data_set(tmp_path / name, [[[1] * length] for length in lengths])
    return tmp_path


def run(folder: Path, *words: object, seq_length: int = 250) -> int:
    given = ["--data", *(f"{name}={folder / name}" for name in LENGTHS)] if "--report" not in words else []
    options = [*given, "--output", folder / "mixture", "--seq-length", seq_length, *words]
    return cli.main([command.NAME, mix.NAME, *map(str, options)])


def test_the_file_and_the_table(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, "--simulate", 1600) == 0
    # 4 samples of up to 250 tokens, and 20 samples, as in the files.
    words = (folder / "mixture").read_text().split()
    assert words == ["0.166667", str(folder / "books"), "0.833333", str(folder / "chats")]
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1] == ["books", "600", "75.0%", "x", "1.00", "x", "1.00", "-", "75.0%"]
    assert lines[-3:-1] == [[str(folder / "books"), "600", "2.00"], [str(folder / "chats"), "200", "2.00"]]
    assert lines[-1] == ["train", "with", "--data-args-path", str(folder / "mixture"), "--seq-length", "250"]


def test_samples_of_one_length(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, "--samples", "windows", "--json", seq_length=100) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["weight"] for one in found["blend"]] == pytest.approx([0.75, 0.25])


def report_of(folder: Path, policy: str, prefix: bool = True) -> Path:
    zero = {"bad": {}, "masked": 0, "near": 0, "sentences": 0, "sentence_bytes": 0, "kept_bytes": 1, "read_bytes": 2}
    sources = {
        "books": SourceReport(read=10, filtered={"c4: curly_bracket": 2}, exact=4, kept=4, weight=4.0, **zero),
        "chats": SourceReport(read=10, filtered={}, exact=0, kept=10, weight=10.0, **zero),
    }
    sets: list[dict[str, object]] = [
        {"name": name, "source": name, "weight": 1.0, "shards": [], "prefix": str(folder / name) if prefix else None}
        for name in sources
    ]
    path = folder / "report.json"
    save_report(path, Report("", {"policy": policy}, sources, sets, {}))
    return path


@pytest.mark.parametrize(("policy", "duplication"), [("drop", 0.5), ("weight", 1.0)])
def test_a_report_gives_reasons(
    policy: str, duplication: float, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(folder, "--report", report_of(folder, policy), "--json", "--temperature", 2) == 0
    books, chats = json.loads(capsys.readouterr().out)["sources"]
    assert (books["duplication"], books["quality"]) == pytest.approx((duplication, 0.8))
    value = np.sqrt(600 * duplication * 0.8)
    assert books["share"] == pytest.approx(value / (value + np.sqrt(200)))
    assert chats["quality"] == 1


def test_bad_input_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = report_of(folder, "drop", prefix=False)
    (folder / "mixture").write_text("as it was")
    for words, message in (
        (("--temperature", 0), "--temperature 0: give a number above 0"),
        (("--quality-power", -1), "--quality-power -1: give a number of 0 or more"),
        (("--report", report), "books has text and no tokens: clean with --tokenize"),
        (("--report", folder / "none.json"), "none.json: No such file"),
        (("--data", "books"), "--data books: give NAME=PREFIX"),
        (("--data", f"x={folder / 'x'}"), "x.idx"),
        (("--output", folder), "is a folder: give a file name"),
        (("--report", report, "--output", report), f"would overwrite the input {report}: give another name"),
        (("--proxy-steps", 8), "source books has tokens for 0 steps without repetition"),
        (("--proxy-steps", 8, "--data", f"books={folder / 'books'}"), "compares sources: give two or more"),
    ):
        assert run(folder, *words) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    assert (folder / "mixture").read_text() == "as it was"
    nothing = ["--output", str(folder / "mixture"), "--seq-length", "8"]
    assert cli.main([command.NAME, mix.NAME, *nothing]) == 2
    assert "no data sets: give --report or --data" in capsys.readouterr().err


def test_clear_proposals_change_shares_and_others_do_not(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clear = proxy.Proposal(0.2, 1.5, 1.2, 1.8)
    unclear = proxy.Proposal(0.1, 0.5, 0.4, 1.1)
    monkeypatch.setattr(proxy, "proposals_of", lambda *_: {"books": clear, "chats": unclear})
    assert run(folder, "--proxy-steps", 8) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "x 1.50 (1.20 to 1.80)  81.8%" in lines[1]
    assert "x 0.50 (0.40 to 1.10), left out  18.2%" in lines[2]
