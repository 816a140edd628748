"""The recipe from text to training: real commands on a few files, with a failure and a second call."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bytescale_ext.data.corpus.windows_file import load_windows
from tests.data.cleaning import HEADER, text
from tests.scripts.launchers import LONG_CONTEXT, ROOT, run

pytestmark = pytest.mark.ranks

# Wrappers of the console and of Python: each records its words, and the first call of sculpt fails.
WRAPPER = """#!/bin/bash
echo "$*" >> "{folder}/calls"
if [[ " $* " == *" sculpt "* ]] && ! [ -e "{folder}/failed" ]; then
  touch "{folder}/failed"
  exit 3
fi
exec {command} "$@"
"""


# Six lines, as long as the sentences that the recipe removes.
LICENCE = HEADER + "".join(f"the {line}\n" for line in HEADER.splitlines())


def write_texts(folder: Path) -> None:
    for place, suffix in enumerate((".py", ".h")):
        texts = folder / suffix[1:]
        texts.mkdir()
        for number in range(12):
            body = text(100 * place + number % 10, 60 + 20 * number if number < 10 else 60 + 20 * (number - 10))
            (texts / f"{number}{suffix}").write_text(LICENCE + body)


def recipe(folder: Path) -> subprocess.CompletedProcess[str]:
    commands = {"bytescale": str(Path(sys.executable).parent / "bytescale"), "python": sys.executable}
    for name, command in commands.items():
        (folder / name).write_text(WRAPPER.format(folder=folder, command=command))
        (folder / name).chmod(0o755)
    places = {"BYTESCALE": "bytescale", "PYTHON": "python", "OUT": "out", "PYTHON_TEXTS": "py", "HEADER_TEXTS": "h"}
    sizes = {"CONTEXT": "2K", "STEPS": "2", "RANKS": "1", "WORKERS": "1"}
    return run([LONG_CONTEXT], 500, **{name: str(folder / place) for name, place in places.items()}, **sizes)


def stages(folder: Path) -> list[str]:
    """Return the stages that were called since the last call of this function."""
    calls = (folder / "calls").read_text().splitlines()
    (folder / "calls").write_text("")
    words = ("clean", "mix", "sculpt", "megatron.bytescale.launch")
    return [word for call in calls for word in words if word in call.split()]


@pytest.mark.timeout(900)
@pytest.mark.full
def test_from_text_to_training_after_a_failure(tmp_path: Path) -> None:
    write_texts(tmp_path)
    out = tmp_path / "out"
    launch = "megatron.bytescale.launch"
    expected = [["clean", "mix", "sculpt"], ["sculpt", "sculpt", launch], []]
    first_report = None
    for place, called in enumerate(expected):
        done = recipe(tmp_path)
        assert stages(tmp_path) == called, done.stderr
        assert done.returncode == (0 if place else 3), done.stderr + (out / "train.log").read_text()[-2000:]
        report = (out / "clean" / "report.json").stat().st_mtime_ns
        assert first_report in (None, report)  # nothing is cleaned twice
        first_report = report
        assert not list(out.rglob("*.partial*"))
    assert "trained 2 steps: " in done.stdout
    sources = json.loads((out / "clean" / "report.json").read_text())["sources"]
    for name in ("python", "headers"):
        assert sources[name]["read"] == 12
        assert sources[name]["kept"] == 10  # two documents are duplicates
        assert sources[name]["sentences"] >= 9  # the header
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [1, 2]
    assert all(0 < row["lm loss"] < 8 for row in rows)
    shares = [line.split() for line in (out / "mixture").read_text().splitlines()]
    assert sum(float(share) for share, _ in shares) == pytest.approx(1)
    for _, prefix in shares:
        table, header = load_windows(out / f"{Path(prefix).name}.windows.npy")
        assert header.context == 2048
        assert len(table) >= 10


def test_a_bad_context_is_refused() -> None:
    done = run([LONG_CONTEXT], CONTEXT="long", PYTHON=sys.executable, OUT="/dev/null/none")
    assert done.returncode == 2
    assert done.stderr == ("long_context_data.sh: error: CONTEXT=long is not a whole number, such as 8 or 32K\n")
    assert LONG_CONTEXT.is_relative_to(ROOT)
