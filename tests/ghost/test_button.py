"""The button for GPUs and the tests for GPUs, on a ghost GPU of a machine with torch, pytest and Megatron only."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from scripts.bench.gpu_commands import gpu_commands
from tests.bare import bare_environment
from tests.ghost.devices import needs_ghosts

pytestmark = [pytest.mark.ranks, pytest.mark.full, needs_ghosts]

ROOT = Path(__file__).resolve().parents[2]
HANG_SECONDS = 3600
MINUTES = 50
NO_TRITON = re.compile(r"tests/attention/test_gpu_merge\.py")
"""Tests of kernels of Triton, which ghost GPUs do not run."""


@pytest.mark.timeout(2 * HANG_SECONDS)
def test_every_part_of_the_button_ends(tmp_path: Path) -> None:
    """Every part ends with figures and a headline, and a second call runs none again."""
    python, wheel = bare_environment(tmp_path)
    words = ["scripts/bench/gpu_all.py", "--quick", "--minutes", str(MINUTES), "--output", str(tmp_path / "gpu")]
    program = [str(python), "-m", "tests.ghost.run", *words]
    variables = {**os.environ, "PYTHONPATH": str(wheel), "OMP_NUM_THREADS": "1", "PYTEST_ADDOPTS": ""}
    for _ in range(2):
        ended = subprocess.run(program, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=HANG_SECONDS)
        assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    summary = json.loads((tmp_path / "gpu" / "summary.json").read_text())
    assert [(row["name"], row["status"]) for row in summary] == [
        (command.name, "done before") for command in gpu_commands(1.0, is_quick=True)
    ]
    assert "no headline" not in (tmp_path / "gpu" / "table.txt").read_text()
    assert (tmp_path / "gpu" / "h100.json").exists()
    failures = summary[0]["figures"]["failures"]
    assert [name for name in failures if not NO_TRITON.match(name)] == []
