"""Data set of most trainings."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.corpora import documents


@pytest.fixture(scope="session")
def corpus() -> Path:
    """Data set of most trainings: documents of ``corpora.LENGTHS``, four times. Tests do not write to it."""
    return documents()
