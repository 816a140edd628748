"""``bytescale draft export`` writes a folder once, and refuses what it cannot write, in one line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megatron.bytescale import cli
from megatron.bytescale.cli.generate import draft
from tests.e2e.drafts import ONE, heads_of, trunk
from tests.harness import run_ranks

pytestmark = pytest.mark.ranks


def lines(rank: int, world: int, cases: list[list[str]]) -> list[int]:
    """Return the exit codes of command lines."""
    return [cli.main(words) for words in cases]


def test_export(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    heads, model, folder = str(heads_of(1, *ONE).save), str(trunk()), str(tmp_path / "clover")
    export = ["draft", "export", "--to", "safetensors", "--output", folder, "--load"]
    capfd.readouterr()
    cases = [[*export, model], [*export, heads], [*export, heads], [*export, str(tmp_path)], export[:-1]]
    assert run_ranks(lines, 1, cases, init_group=False) == [[2, 0, 2, 2, 2]]
    shown = capfd.readouterr()
    printed = re.search(rf"{folder}: 3 clover heads, ([\d,]+) parameters", shown.out)
    assert printed is not None
    assert f"bytescale generate --load MODEL --draft {folder} --prompt TEXT" in shown.out
    config = json.loads((tmp_path / "clover" / "config.json").read_text())
    numel = 0
    for shape in config["tensors"].values():
        size = 1
        for extent in shape:
            size *= extent
        numel += size
    assert numel == int(printed[1].replace(",", ""))
    errors = [line for line in shown.err.splitlines() if line.startswith("bytescale draft export: error: ")]
    messages = ("this checkpoint has no draft heads", "it exists already", "there is no checkpoint", "required: --load")
    assert len(errors) == len(messages)
    assert all(message in error for message, error in zip(messages, errors, strict=True))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["clover"]


def test_its_example_is_a_line_that_it_takes() -> None:
    args = cli.parse(draft.EXAMPLE.split()[1:])
    assert (args.prog, args.to, args.output) == ("bytescale draft export", "safetensors", Path("clover"))
