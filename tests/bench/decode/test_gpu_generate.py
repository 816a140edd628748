"""The benchmark of decoding runs on CPU with a tiny model, and both arms give the same tokens."""

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

NEW_TOKENS = 6


def measured(rank: int, world: int, load: Path, text: Path) -> str:
    """Return the output of the benchmark."""
    from megatron.bytescale import cpu

    cpu.install_if_wanted(["--cpu"])
    from scripts.bench.decode import gpu_generate

    lengths = ["--prompts", "8", "300", "--batches", "1", "2", "--max-tokens", str(NEW_TOKENS)]
    sys.argv = ["gpu_generate.py", "--load", str(load), "--text", str(text), "--device", "cpu", "--json", *lengths]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        gpu_generate.main()
    return printed.getvalue()


@pytest.mark.full
def test_it_measures(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("0123456789 +-*/ 0123 456\n")
    (printed,) = run_ranks(measured, 1, heads_of(1, *ONE).save, text, init_group=False)
    *lines, figures = printed.strip().splitlines()
    rows = json.loads(figures)
    cases = [(8, 1), (8, 2), (300, 1), (300, 2)]  # beyond the context of training
    assert [(row["prompt"], row["batch"]) for row in rows] == cases
    for row, line in zip(rows, lines[-4:], strict=True):
        assert row["equal"]
        assert line.startswith(f"{row['batch']} x {row['prompt']} tokens in ")
        assert line.endswith("; equal tokens")
        assert row["plain_forwards"] == NEW_TOKENS - 1
        assert 1 <= row["drafts_forwards"] <= NEW_TOKENS - 1
        for arm in ("plain", "drafts"):
            assert row[f"{arm}_prompt_seconds"] > 0
            assert row[f"{arm}_tokens_per_second"] > 0
