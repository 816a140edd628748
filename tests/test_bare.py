"""Programs for a GPU on a machine that has only torch, Megatron and pytest."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ranks, pytest.mark.full]

ROOT = Path(__file__).resolve().parents[1]
# Imports fail for packages that neither torch nor Megatron nor pytest installs.
BARE = """
import sys
from importlib.metadata import packages_distributions
from tests.bare import MEGATRON, canonical, needs

installed = {canonical(package.name) for package in needs(("torch", MEGATRON, "pytest", "setuptools"))}
for module, owners in packages_distributions().items():
    is_ours = module in ("megatron", "bytescale_ext", "pretrain_gpt_hdp")
    if not is_ours and installed.isdisjoint(map(canonical, owners)):
        sys.modules[module] = None
"""
COLLECT = "import pytest; sys.exit(pytest.main(['-m', 'gpu', '--collect-only', '-p', 'no:cacheprovider']))"
BUTTON = "import runpy; sys.argv[1:] = ['--dry-run']; runpy.run_path('scripts/bench/gpu_all.py', run_name='__main__')"


def run_bare(program: str) -> str:
    """Return the output of a Python program on a bare machine, where it must succeed."""
    ended = subprocess.run(
        [sys.executable, "-c", BARE + program],
        cwd=ROOT,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    return ended.stdout


def test_gpu_tests_are_collected() -> None:
    """Every file whose name starts with ``test_gpu`` is collected, and other files have no GPU test."""
    collected = set(re.findall(r"^(tests/\S+\.py)", run_bare(COLLECT), re.MULTILINE))
    files = {str(path.relative_to(ROOT)): path.read_text() for path in ROOT.glob("tests/**/test_*.py")}
    assert collected == {name for name, text in files.items() if re.search(r"^@?.*pytest\.mark\.gpu\b", text, re.M)}
    assert all(Path(name).name.startswith("test_gpu") for name in collected)


def test_the_button_starts() -> None:
    assert "training" in run_bare(BUTTON)
