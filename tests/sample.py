"""Samples of long tables of cases: `make test` runs the sample, `make test-all` runs every case."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from typing import Any

import pytest

WHOLE = "BYTESCALE_TESTS_WHOLE"
"""Environment variable that ``conftest.py`` sets to 1 in a run of every case."""

SHARE_OF_SEEDS = 4
"""`make test` runs one of this many seeds and examples."""


def sampled(cases: Iterable[Any], sample: Collection[Any]) -> list[Any]:
    """Return the cases as parameters; cases outside the sample run in `make test-all` only.

    Raises ValueError if the sample has an unknown case.
    """
    cases = list(cases)
    if unknown := [case for case in sample if case not in cases]:
        raise ValueError(f"the sample has unknown cases: {unknown}")
    return [case if case in sample else _full(case) for case in cases]


def seeds(number: int) -> list[Any]:
    """Return seeds of random cases as parameters; most of them run in `make test-all` only."""
    return sampled(range(number), range(-(-number // SHARE_OF_SEEDS)))


def examples(number: int) -> int:
    """Return the number of examples that hypothesis tries: ``number`` in `make test-all`, else a part of it."""
    return number if is_whole() else -(-number // SHARE_OF_SEEDS)


def is_whole() -> bool:
    """Return whether this run has every case."""
    return os.environ.get(WHOLE) == "1"


def _full(case: Any) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.full)
