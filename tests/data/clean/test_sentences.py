"""Repeated sentences."""

from __future__ import annotations

from pathlib import Path

from datatrove.data import Document

from bytescale_ext.data.clean.recipe import Recipe
from bytescale_ext.data.clean.sentences import SentenceFilter, SentenceSignatures
from bytescale_ext.data.clean.stages import stages_of
from tests.data.cleaning import HEADER, folder_of, run_recipe, run_steps, text, told

STEPS = ("sentences",)


def cleaned(recipe: Recipe, work: Path) -> list[Document]:
    """Run the stages and return the documents that reach the writer."""
    run_recipe(recipe, work)
    write = next(stage for stage in stages_of(recipe, work, print) if stage.name == "write")
    return run_steps(write.steps[:2], write.tasks)  # type: ignore[return-value]


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


def test_runs_of_few_words_stay(tmp_path: Path) -> None:
    brackets = "\n}\n}\nreturn 0\n"
    bodies = {f"{number}.txt": text(number, 50) + brackets + text(number + 50, 50) for number in range(4)}
    recipe = Recipe((folder_of(tmp_path, "docs", bodies),), steps=STEPS)
    assert all(brackets in one.text for one in cleaned(recipe, tmp_path / "work"))


def test_numbers_tell_sentences_apart(tmp_path: Path) -> None:
    rows = "\n".join(f"the value of the register number {{{i}}} is {{{i}}} today" for i in range(3))
    bodies = {f"{number}.txt": rows.format(*[number * 10 + i for i in range(3)]) for number in range(3)}
    recipe = Recipe((folder_of(tmp_path, "docs", bodies),), steps=STEPS)
    cleaned(recipe, tmp_path / "work")
    assert "sentences" not in told(tmp_path / "work").counts["docs"]


def test_a_document_of_repeated_sentences_alone_goes(tmp_path: Path) -> None:
    bodies = {"a.txt": text(1) + "\n" + HEADER.strip(), "b.txt": HEADER.strip()}
    recipe = Recipe((folder_of(tmp_path, "docs", bodies),), steps=STEPS)
    assert [one.id for one in cleaned(recipe, tmp_path / "work")] in (["docs/a.txt"], ["docs/b.txt", "docs/a.txt"])
    assert told(tmp_path / "work").counts["docs"]["sentences only"] == 1


def test_a_document_of_more_sentences_than_datatrove_numbers(tmp_path: Path) -> None:
    signer = SentenceSignatures(Recipe(()), tmp_path)
    body = "\n".join(f"one two three four five {number}" for number in range(66_000))
    hashes = signer.get_hashes(Document(body, "a"), 0)
    assert max(one[2] for one in hashes) == 65_535
    signer.save_hashes(0, hashes)  # in 16 bits
    assert signer.get_hashes(Document("one\ntwo", "b"), 1) == []


def test_counts_are_of_one_task(tmp_path: Path) -> None:
    step = SentenceFilter(Recipe(()), tmp_path, tmp_path / "told")
    document = Document("a b c.\nd e f.\ng h i.\nrest of it", "a", metadata={"source": "docs"})
    assert step.remove_dup_sentences(document, [0])[0] == "rest of it"  # type: ignore[arg-type]
    step.close(3)
    assert (tmp_path / "told" / "sentences-00003.json").exists()
    assert told(tmp_path).counts == {"docs": {"sentences": 1}}
