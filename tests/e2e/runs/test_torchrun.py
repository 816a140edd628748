"""Refusals under torchrun itself: the reasons are seen, first and last."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.training import HDP, MODEL, TRAIN

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.ranks
@pytest.mark.full
def test_a_refusal_is_seen(tmp_path: Path) -> None:
    flags = [*MODEL, *TRAIN, *HDP, "--cpu", "--enable-cuda-graph", "--data-path", "none"]
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", str(ROOT / "pretrain_gpt_hdp.py")]
    ended = subprocess.run(
        [sys.executable, *words, *flags],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert ended.returncode != 0
    reason = "--hybrid-data-parallel does not work with --enable-cuda-graph"
    lines = ended.stderr.splitlines()
    first = next(number for number, line in enumerate(lines) if reason in line)
    assert lines[first].startswith("pretrain_gpt_hdp.py: error: ")
    assert first == 0, "\n".join(lines[:first])
    assert sum(line.startswith("pretrain_gpt_hdp.py: error: ") for line in lines) == 1
    assert "arguments ---" not in ended.stdout + ended.stderr
    (root_cause,) = ended.stderr.split("Root Cause")[1:]
    assert f"traceback : {reason}" in root_cause
