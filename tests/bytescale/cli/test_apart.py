"""Commands whose output would replace an input, or be read as input by the next call."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megatron.bytescale import cli
from megatron.bytescale.core.datasets.corpus import write_tokens

# The words of a command in the folder {in}, which has the data set a, its plan, a report and texts.
APART = [
    "corpus --from {in}/texts --output {in}/texts/new",
    "corpus --from {in}/texts --output {in}/texts/below/new",
    "corpus --from {in}/a.bin --output {in}/a",
    "corpus --from {in}/*.bin --output {in}/texts/../a",
    "data mix --data a={in}/a b={in}/a --seq-length 8 --output {in}/a.idx",
    "data sculpt --input {in}/a {in}/a --seq-length 8 --output {in}/a",
    "data sculpt --input {in}/a.windows --seq-length 8 --materialise --output {in}/a",
    "logprobs --data {in}/a --load {in} --output {in}/a -- --hybrid-data-parallel",
    "timeline --plan {in}/plan.json --output {in}/plan",
    "search --model-flags=--num-layers=2 --ranks 1 --seq-length 8 --device-memory-gb 9 --sampler github "
    "--cost-file {in}/c.cost.json --output {in}/c.sh",
]


@pytest.mark.parametrize("words", APART)
def test_an_output_replaces_no_input(words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for prefix in ("a", "a.windows"):
        write_tokens(tmp_path / prefix, (np.arange(number, number + 4) for number in range(20)))
    for name in ("plan.json", "c.cost.json"):
        (tmp_path / name).write_text(json.dumps({}))
    (tmp_path / "texts" / "below").mkdir(parents=True)
    (tmp_path / "texts" / "text").write_text("a text")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert cli.main(words.replace("{in}", str(tmp_path)).split()) == 2
    error = capsys.readouterr().err
    assert "would overwrite the input" in error or "is inside the source" in error
    assert error.count("\n") == 1
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_pattern_may_leave_the_output_out(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a text")
    for _ in range(2):
        words = ["corpus", "--from", str(tmp_path), "--glob", "*.txt", "--output", str(tmp_path / "a")]
        assert cli.main(words) == 0
