"""Figures of a run of the GPU tests."""

from __future__ import annotations

import pytest

from scripts.bench.gpu_tests import figures_of

PRINTED = """....F..E.
tests/a.py:3: 12 passed the first gate
=========================== short test summary info ============================
SKIPPED [2] tests/b.py:9: flash_attn: the package is not installed
FAILED tests/a.py::test_x[1-fp32] - AssertionError: 2 failed
ERROR tests/c.py::test_y
1 failed, 90 passed, 2 skipped, 1 error in 61.20s
"""


def test_outcomes_are_counted_from_the_summary() -> None:
    assert figures_of(PRINTED) == {
        "passed": 90, "failed": 1, "error": 1, "skipped": 2,
        "failures": ["tests/a.py::test_x[1-fp32]", "tests/c.py::test_y"],
    }  # fmt: skip
    assert figures_of("3 passed in 1.2s") == {"passed": 3, "failed": 0, "error": 0, "skipped": 0, "failures": []}


def test_a_run_without_a_summary_has_no_figures() -> None:
    with pytest.raises(RuntimeError, match="no summary"):
        figures_of("ImportError: no module named pytest")
