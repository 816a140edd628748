"""The recipe of draft heads calls the console with valid words, in an order that writes each file before its use."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from megatron.bytescale import cli
from tests.bytescale.arguments.resolving import resolve_lines
from tests.scripts.launchers import DRAFT_HEADS, run

pytestmark = pytest.mark.ranks

# A fake console: it records its words and writes the files that the recipe expects.
FAKE = r"""#!/bin/bash
printf '%s\n' "$*" >> "${0%/*}/calls"
case $1 in
  corpus) : > "$3.idx" ;;
  train)
    while [ "$1" != --save ]; do shift; done
    mkdir "$2"
    echo 7 > "$2/latest_checkpointed_iteration.txt"
    ;;
  *) echo "2 texts: some tokens" >&2 ;;
esac
"""


def run_recipe(folder: Path) -> subprocess.CompletedProcess[str]:
    sizes = {"STEPS": "5", "MINUTES": "1", "SEEDS": "3", "TEXTS": "2", "TOKENS": "9"}
    return run([DRAFT_HEADS], BYTESCALE=str(folder / "bytescale"), OUT=str(folder / "out"), **sizes)


def test_the_recipe_of_draft_heads(tmp_path: Path) -> None:
    fake = tmp_path / "bytescale"
    fake.write_text(FAKE)
    fake.chmod(0o755)
    done = run_recipe(tmp_path)
    assert done.returncode == 0, done.stderr
    calls = [line.split() for line in (tmp_path / "calls").read_text().splitlines()]
    assert [words[0] for words in calls] == ["corpus", *["train"] * 3, *["generate"] * 11]
    for words in calls:
        cli.parse(words)
    training = [(1, words[1:]) for words in calls if words[0] == "train"]
    model, *heads = resolve_lines(*training)
    assert model.error is None
    for line in heads:  # the fake writes no tensors
        assert line.error is not None
        assert "there is no checkpoint" in line.error
    prompts = (tmp_path / "out" / "prompts").read_text().splitlines()
    assert len(prompts) == 2
    assert all(30 <= len(line) <= 90 for line in prompts)
    lines = done.stdout.splitlines()
    assert "clover, seed 3, --plain: 2 texts: some tokens" in lines
    assert len([line for line in lines if re.match(r"(clover|medusa), seed 3, --", line)]) == 11
    (tmp_path / "calls").unlink()
    assert run_recipe(tmp_path).returncode == 0  # nothing is trained twice
    again = [line.split()[0] for line in (tmp_path / "calls").read_text().splitlines()]
    assert set(again) == {"generate"}
