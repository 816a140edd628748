"""The launcher on ghost GPUs, as a user starts it: a process for each GPU, a checkpoint, and a second start."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.e2e.corpora import VOCAB
from tests.ghost.devices import needs_ghosts
from tests.ghost.run import variables
from tests.scripts.launchers import LOCAL

pytestmark = [pytest.mark.ranks, pytest.mark.full, needs_ghosts]

HANG_SECONDS = 1800
MODEL = {"LAYERS": "2", "HIDDEN": "32", "FFN": "48", "HEADS": "4", "KV_HEADS": "2", "SEQ_LENGTH": "256"}
STEPS = "--train-iters 4 --lr-decay-iters 4 --lr-warmup-fraction 0 --eval-interval 2 --eval-iters 1".split()


def start(corpus: Path, out: Path, *flags: str) -> str:
    """Run the launcher on two ghost GPUs, and return its output."""
    given = {
        **variables(2),
        **MODEL,
        "DATA": str(corpus),
        "TOKENIZER": f"--tokenizer-type NullTokenizer --vocab-size {VOCAB}",
        "TOKENS_PER_RANK": "128",
        "BATCH": "8",
        "OUT": str(out),
    }
    words = [str(LOCAL), *STEPS, *flags]
    ended = subprocess.run(words, env=given, capture_output=True, text=True, timeout=HANG_SECONDS)
    text = ended.stdout + ended.stderr
    assert ended.returncode == 0, text[-5000:]
    return text


def test_a_run_ends_cleanly_and_goes_on(corpus: Path, tmp_path: Path) -> None:
    begun = start(corpus, tmp_path / "out", "--exit-interval", "2")
    resumed = start(corpus, tmp_path / "out")
    for text, iterations in ((begun, ["1", "2"]), (resumed, ["3", "4"])):
        assert re.findall(r"iteration +(\d+)/ +4 ", text) == iterations
        assert "destroy_process_group() was not called" not in text
        assert "flight recorder dump" not in text
    assert not list((tmp_path / "out" / "nccl").iterdir())
