"""Trainings on one GPU, without gloo and without stand-ins for CUDA."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.harness import free_port

ROOT = Path(__file__).resolve().parents[2]


def train_on_gpu(words: list[str]) -> str:
    """Return the output of a training on one GPU."""
    port = str(free_port())
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    command = [sys.executable, str(ROOT / "pretrain_gpt_hdp.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **place}, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
