"""The recipe of upcycling trains with valid words, each training once."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.bytescale.arguments.resolving import resolve_lines
from tests.scripts.launchers import UPCYCLE, run

pytestmark = pytest.mark.ranks

# A fake console and Python: they record their words and write the files that the recipe expects.
FAKE = r"""#!/bin/bash
printf '%s\n' "$*" >> "${0%/*}/calls"
case $1 in
  corpus) : > "$3.idx" ;;
  *)
    while [ "$1" != --save ]; do shift; done
    mkdir "$2"
    echo 7 > "$2/latest_checkpointed_iteration.txt"
    echo "validation loss at iteration 7 | lm loss value: 2.5 | "
    ;;
esac
"""


def run_recipe(folder: Path, **sizes: str) -> subprocess.CompletedProcess[str]:
    fake = str(folder / "fake")
    return run([UPCYCLE], BYTESCALE=fake, PYTHON=fake, OUT=str(folder / "out"), **sizes)


def test_the_recipe_of_upcycling(tmp_path: Path) -> None:
    (tmp_path / "fake").write_text(FAKE)
    (tmp_path / "fake").chmod(0o755)
    done = run_recipe(tmp_path, STEPS="9", ANNEAL="4")
    assert done.returncode == 0, done.stderr
    corpus, *trainings = [line.split() for line in (tmp_path / "calls").read_text().splitlines()]
    assert corpus[0] == "corpus"
    start = ["-P", "-m", "megatron.bytescale.launch", "--nproc-per-node", "2", "pretrain_gpt_hdp.py"]
    assert [words[:6] for words in trainings] == [start] * 4
    fresh = [
        [word.replace("/out/gate", "/new").replace("/out/topk", "/new") for word in words[6:]] for words in trainings
    ]
    dense, gate, topk, last = resolve_lines(*((2, words) for words in fresh))
    assert [line.error for line in (dense, gate, topk, last)] == [None] * 4
    assert gate.features.keys() == {"hdp", "gate", "upcycling"}
    assert topk.features.keys() == {"hdp", "upcycling"}
    assert dense.features.keys() == last.features.keys() == {"hdp"}
    assert gate.features["gate"].steps == 4
    assert [line.split()[0] for line in done.stdout.splitlines()[-4:]] == ["dense", "gate", "topk", "dense-on"]
    (tmp_path / "calls").unlink()
    assert run_recipe(tmp_path).returncode == 0
    assert not (tmp_path / "calls").exists(), "nothing is trained twice"


def test_a_bad_number_is_refused(tmp_path: Path) -> None:
    done = run_recipe(tmp_path, ANNEAL="half")
    assert done.returncode == 2
    assert done.stderr == "upcycle_dts.sh: error: ANNEAL=half is not a whole number, such as 8 or 32K\n"
    assert not (tmp_path / "out").exists()
