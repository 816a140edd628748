"""``bytescale draft export`` writes a folder once, and refuses invalid exports in one line."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path

import pytest

from megatron.bytescale import cli
from tests.e2e.drafts import ONE, heads_of, trunk
from tests.harness import run_ranks

pytestmark = pytest.mark.ranks


def lines(rank: int, world: int, cases: list[list[str]]) -> tuple[list[int], str, str]:
    """Return the exit codes of command lines, their output and their errors."""
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        codes = [cli.main(words) for words in cases]
    return codes, out.getvalue(), errors.getvalue()


def test_export(tmp_path: Path) -> None:
    heads, model, folder = str(heads_of(1, *ONE).save), str(trunk()), str(tmp_path / "clover")
    export = ["draft", "export", "--to", "safetensors", "--output", folder, "--load"]
    cases = [[*export, model], [*export, heads], [*export, heads], [*export, str(tmp_path)], export[:-1]]
    cases.append([*export[:-3], "--output", str(tmp_path / "again"), "--json", "--load", heads])
    ((codes, shown, refused),) = run_ranks(lines, 1, cases, init_group=False)
    assert codes == [2, 0, 2, 2, 2, 0]
    printed = re.search(rf"{folder}: 3 clover heads, ([\d,]+) parameters", shown)
    assert printed is not None
    assert f"bytescale generate --load MODEL --draft {folder} --prompt TEXT" in shown
    config = json.loads((tmp_path / "clover" / "config.json").read_text())
    numel = 0
    for shape in config["tensors"].values():
        size = 1
        for extent in shape:
            size *= extent
        numel += size
    assert numel == int(printed[1].replace(",", ""))
    errors = [line for line in refused.splitlines() if line.startswith("bytescale draft export: error: ")]
    messages = ("this checkpoint has no draft heads", "it exists already", "there is no checkpoint", "required: --load")
    assert len(errors) == len(messages)
    assert all(message in error for message, error in zip(messages, errors, strict=True))
    figures = json.loads(shown.splitlines()[-1])
    assert figures == {"output": str(tmp_path / "again"), "parameters": numel, **config["heads"]}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "clover"]
