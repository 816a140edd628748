"""The comparison of decoding with drafts and without counts equal texts, and notices one that differs."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path

import pytest

from tests.e2e.drafts import ONE, heads_of
from tests.harness import run_ranks

pytestmark = pytest.mark.ranks

TEXTS, NEW_TOKENS = 3, 5


def compared(rank: int, world: int, load: Path, prompts: Path, spoils: bool) -> tuple[int, str]:
    """Return the exit code, and what it prints."""
    from megatron.bytescale import cpu

    cpu.install_if_wanted(["--cpu"])
    from megatron.bytescale.inference.passes import Passes
    from scripts.bench.decode import lossless

    if spoils:  # trees are accepted as they are

        def check(self: Passes, texts: object, trees: list[object]) -> object:
            found = honest(self, texts, trees)
            return [[7, *new[1:]] if len(tree.tokens) > 1 else new for new, tree in zip(found, trees, strict=True)]

        honest, Passes.check = Passes.check, check  # type: ignore[method-assign, assignment]
    sys.argv = ["lossless.py", "--load", str(load), "--prompts", str(prompts), "--cpu", "--max-tokens", str(NEW_TOKENS)]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        return lossless.main(), printed.getvalue()


def test_it_compares(tmp_path: Path) -> None:
    prompts, load = tmp_path / "prompts", heads_of(1, *ONE).save
    prompts.write_text("0123\n12\n456 789\n")
    (alone,) = run_ranks(compared, 1, load, prompts, False, init_group=False)
    first, second = run_ranks(compared, 2, load, prompts, False)
    assert alone[0] == first[0] == second[0] == 0
    found, cut = (json.loads(printed.splitlines()[-1]) for _, printed in (alone, first))
    assert found["plain_digest"] == cut["plain_digest"]
    assert "{" not in second[1]
    for one in (found, cut):
        assert [row["equal"] for row in one["rows"]] == [TEXTS] * 4
        plain, *with_drafts = (row["forwards"] for row in one["rows"])
        assert plain == TEXTS * (NEW_TOKENS - 1) >= max(with_drafts)
    assert f"plain: {TEXTS} of {TEXTS} texts equal" in alone[1]
    ((code, printed),) = run_ranks(compared, 1, load, prompts, True, init_group=False)
    assert code == 1
    assert json.loads(printed.splitlines()[-1])["rows"][-1]["equal"] < TEXTS
