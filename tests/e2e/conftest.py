"""What most trainings read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.corpora import documents


@pytest.fixture(scope="session")
def corpus() -> Path:
    """The data set of most trainings: documents of ``corpora.LENGTHS``, four times over, never written to."""
    return documents()
