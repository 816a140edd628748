"""Start a training from a script that measures it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[3]


def printed_by(command: Sequence[str]) -> str:
    """Run a command from the root of the project, each process with one thread; return all that it printed.

    Raises:
        RuntimeError: it failed; the message holds the end of its output.
    """
    done = subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"training ended with exit code {done.returncode}:\n{done.stdout[-3000:]}")
    return done.stdout
