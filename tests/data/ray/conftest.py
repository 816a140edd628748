"""A file of text for the tests of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.data.text_files import write_text


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_text(tmp_path / "a.jsonl", 80)
