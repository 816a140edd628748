"""Repeated sentences."""

from __future__ import annotations

from pathlib import Path

import pytest
from datatrove.data import Document

from bytescale_ext.data.clean.recipe import Recipe
from bytescale_ext.data.clean.sentences import SentenceSignatures
from bytescale_ext.data.clean.stages import stages_of
from tests.data.cleaning import HEADER, folder_of, run_recipe, run_steps, text, told

STEPS = ("sentences",)


def cleaned(recipe: Recipe, work: Path) -> list[Document]:
    """Run the stages and return the documents that reach the writer."""
    run_recipe(recipe, work)
    write = next(stage for stage in stages_of(recipe, work, print) if stage.name == "write")
    return run_steps(write.steps[:2], write.tasks)  # type: ignore[return-value]


@pytest.mark.slow
def test_a_header_stays_in_one_document(tmp_path: Path) -> None:
    bodies = {f"{number:02}.txt": HEADER + text(number) for number in range(12)}
    recipe = Recipe((folder_of(tmp_path, "docs", bodies),), steps=STEPS, tasks=3)
    found = cleaned(recipe, tmp_path / "work")
    assert len(found) == 12
    assert sum("Permission is hereby granted" in one.text for one in found) == 1
    for number in range(12):
        assert any(text(number) in one.text for one in found)
    counts = told(tmp_path / "work")
    assert counts.counts["docs"]["sentences"] == 11
    removed = sum(len(body) for body in bodies.values()) - sum(len(one.text) for one in found)
    assert counts.num_bytes["docs"]["sentences"] == removed
    assert "Permission is hereby" in str(counts.examples["sentences"][0]["text"])


@pytest.mark.slow
def test_a_document_of_more_sentences_than_datatrove_numbers(tmp_path: Path) -> None:
    signer = SentenceSignatures(Recipe(()), tmp_path)
    body = "\n".join(f"one two three four five {number}" for number in range(66_000))
    hashes = signer.get_hashes(Document(body, "a"), 0)
    assert max(one[2] for one in hashes) == 65_535
    signer.save_hashes(0, hashes)  # number of a sentence in 16 bits
    assert signer.get_hashes(Document("one\ntwo", "b"), 1) == []
