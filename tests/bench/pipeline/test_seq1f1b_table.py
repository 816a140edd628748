"""The tables of docs/results/slices.md are up to date and complete."""

from __future__ import annotations

import pytest

from scripts.bench.pipeline import seq1f1b_table


@pytest.mark.full
@pytest.mark.slow
def test_the_document_is_up_to_date() -> None:
    text = seq1f1b_table.DOCUMENT.read_text()
    assert seq1f1b_table.with_tables(text) == text, "run scripts/bench/pipeline/seq1f1b_table.py"


@pytest.mark.slow
def test_every_model_and_length_has_rows() -> None:
    rows = [row for row in seq1f1b_table.memory_rows() if row.startswith("| gpt")]
    assert len(rows) == 4 * 3 * 6
    assert sum("out of memory" in row for row in rows) == sum(
        value is None for values in seq1f1b_table.MEMORY.values() for value in values
    )


def test_a_document_without_a_place_for_tables_is_refused() -> None:
    with pytest.raises(ValueError, match="must have the lines"):
        seq1f1b_table.with_tables("no tables here")
