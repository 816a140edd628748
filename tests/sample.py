"""Samples of long tables of cases: `make test` runs the sample, `make test-all` runs every case."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def sampled(cases: Iterable[Any], sample: Collection[Any]) -> list[Any]:
    """Return the cases as parameters; cases outside the sample run in `make test-all` only.

    Raises ValueError if the sample has an unknown case.
    """
    cases = list(cases)
    if unknown := [case for case in sample if case not in cases]:
        raise ValueError(f"the sample has unknown cases: {unknown}")
    return [case if case in sample else _full(case) for case in cases]


def _full(case: Any) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.full)
