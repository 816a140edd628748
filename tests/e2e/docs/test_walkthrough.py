"""docs/guide/walkthrough.md, from end to end: its commands and its Python, at a small size."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.docs.pages import ROOT, code_lines, with_values

PAGE = ROOT / "docs" / "guide" / "walkthrough.md"
SMALL = {
    "--train-iters": "4",
    "--lr-warmup-iters": "1",
    "--eval-interval": "2",
    "--log-interval": "1",
    "--save-interval": "4",
    "--num-layers": "2",
}
MODULES = {"bytescale": ["-m", "megatron.bytescale.cli"], "torchrun": ["-m", "torch.distributed.run"]}


def run(words: list[str], folder: Path) -> str:
    """Run Python in a folder and return its output. Raises AssertionError with the end of it if Python fails."""
    ended = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert ended.returncode == 0, f"{shlex.join(words)[:200]}\n{ended.stdout[-1000:]}{ended.stderr[-2000:]}"
    return ended.stdout


@pytest.mark.ranks
@pytest.mark.full
def test_own_texts_become_a_model_of_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    texts = [path.read_text() for path in sorted((ROOT / "docs" / "guide").glob("*.md"))]
    (tmp_path / "notes.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokenizer, load = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    run(["-c", tokenizer], tmp_path)
    printed = {}
    for line in code_lines(PAGE.read_text()):
        words = with_values(shlex.split(line), SMALL)
        printed[words[1]] = run([*MODULES[words[0]], *words[1:]], tmp_path)
    assert list(printed) == ["corpus", "plan", "--nproc-per-node", "generate", "convert"]
    assert len(re.findall(r"iteration +\d+/ +4 .*lm loss", printed["--nproc-per-node"])) == 4
    ours = printed["generate"].strip()
    theirs = run(["-c", load], tmp_path).strip()
    assert theirs.endswith(ours), f"{theirs!r} and {ours!r}"
