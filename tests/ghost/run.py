"""Runs a Python program, and the programs that it starts, on ghost GPUs.

    .venv/bin/python -m tests.ghost.run -m pytest -m gpu tests/e2e/runs/test_gpu_features.py
    .venv/bin/python -m tests.ghost.run scripts/bench/gpu_all.py --minutes 30

Arguments are passed to the interpreter. GHOST_DEVICES gives the number of GPUs (1).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.ghost.environment import environment

ROOT = Path(__file__).resolve().parents[2]


def variables(num_devices: int) -> dict[str, str]:
    """Return the variables of a process whose Python loads the kernels when it starts."""
    paths = (str(ROOT / "tests/ghost/site"), str(ROOT), os.environ.get("PYTHONPATH", ""))
    return {**os.environ, **environment(num_devices), "PYTHONPATH": os.pathsep.join(filter(None, paths))}


if __name__ == "__main__":
    gpus = int(os.environ.get("GHOST_DEVICES", "1"))
    os.execve(sys.executable, [sys.executable, *sys.argv[1:]], variables(gpus))
