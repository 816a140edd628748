"""Paths of the launchers, and a clean environment to run them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LOCAL = ROOT / "scripts" / "train_local.sh"
SLURM = ROOT / "scripts" / "train_slurm.sbatch"
CHECKS = ROOT / "scripts" / "checks.sh"
DRAFT_HEADS = ROOT / "scripts" / "recipes" / "draft_heads.sh"
UPCYCLE = ROOT / "scripts" / "recipes" / "upcycle_dts.sh"
LONG_CONTEXT = ROOT / "scripts" / "recipes" / "long_context_data.sh"
SHELL_FILES = [
    LOCAL,
    SLURM,
    CHECKS,
    DRAFT_HEADS,
    LONG_CONTEXT,
    UPCYCLE,
    ROOT / "scripts" / "slurm" / "local_cluster.sh",
    ROOT / ".ci" / "run",
]


def run(command: Sequence[str | Path], timeout: float = 60, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command whose environment has only PATH, HOME and ``variables``."""
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), **variables}
    words = [str(word) for word in command]
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=timeout)
