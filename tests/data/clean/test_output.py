"""Parts, shards and weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest
from datatrove.data import Document

from bytescale_ext.data.clean.output import Write, gather
from bytescale_ext.data.clean.recipe import Recipe, Source
from bytescale_ext.data.clean.stages import stages_of
from tests.data.cleaning import document, run_steps, told

SOURCES = tuple(Source(name, ".", "text", "*", ()) for name in ("docs", "code"))
MADE = [document("one", "a", copies=1), document("two", "b", copies=2), document("three", "c", "code", copies=100)]


def write(recipe: Recipe, work: Path, tasks: int = 1) -> None:
    def documents(_: object, rank: int, world: int) -> Iterator[Document]:
        for made in MADE[rank::world]:
            made.metadata["shard"] = rank
            yield made

    run_steps([documents, Write(recipe, work)], tasks)


@pytest.mark.parametrize(
    ("policy", "names"), [("drop", ["docs", "code"]), ("weight", ["docs", "docs-x1.75", "code-x3.00"])]
)
def test_documents_lie_by_source_and_weight(policy: str, names: list[str], tmp_path: Path) -> None:
    recipe = Recipe(SOURCES, policy=policy)
    write(recipe, tmp_path / "work")
    sets = gather(recipe, tmp_path / "work", tmp_path / "out")
    assert [one.name for one in sets] == names
    lines = {
        one.name: [json.loads(line)["text"] for shard in one.shards for line in shard.read_text().splitlines()]
        for one in sets
    }
    assert sorted(chain.from_iterable(lines.values())) == ["one", "three", "two"]
    assert told(tmp_path / "work").counts["docs"]["kept"] == 2
    if policy == "weight":
        assert told(tmp_path / "work").counts["code"]["weight 3.00"] == 1
        assert [one.weight for one in sets] == [1.0, 1.75, 3.0]


def test_a_score_becomes_a_weight(tmp_path: Path) -> None:
    recipe = Recipe(SOURCES, policy="weight", weight_key="score")
    made = [document(f"{score}", copies=2, keys={"score": score}) for score in (0.0, 0.3, 1.0, 9.0)]
    run_steps([lambda *_: iter(made), Write(recipe, tmp_path / "work")])
    sets = gather(recipe, tmp_path / "work", tmp_path / "out")
    assert [(one.name, one.weight) for one in sets] == [
        ("docs-x0.25", 0.25), ("docs-x0.50", 0.5), ("docs-x1.75", 1.75), ("docs-x3.00", 3.0),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="weight_key score: a document has None, not a number"):
        run_steps([lambda *_: iter(MADE), Write(recipe, tmp_path / "other")])


def test_a_task_that_runs_again_writes_its_parts_anew(tmp_path: Path) -> None:
    recipe = Recipe(SOURCES)
    for _ in range(2):
        write(recipe, tmp_path / "work", tasks=2)
    sets = gather(recipe, tmp_path / "work", tmp_path / "out")
    assert [len(one.shards) for one in sets] == [2, 1]
    assert len((tmp_path / "out" / "docs" / "00000.jsonl").read_text().splitlines()) == 1


def test_moving_goes_on_where_it_was(tmp_path: Path) -> None:
    recipe = Recipe(SOURCES)
    write(recipe, tmp_path / "work", tasks=3)
    first = tmp_path / "work" / "parts" / "00000" / "docs.jsonl"
    moved = tmp_path / "out" / "docs" / "00000.jsonl"
    moved.parent.mkdir(parents=True)
    first.rename(moved)  # like the files of a killed run
    sets = gather(recipe, tmp_path / "work", tmp_path / "out")
    assert [path.name for path in sets[0].shards] == ["00000.jsonl", "00001.jsonl"]
    assert gather(recipe, tmp_path / "work", tmp_path / "out") == sets


def test_keys_of_a_document_survive(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(
        '{"body": "a b", "text": "t", "url": "u", "n": [1, {"a": null}], "source": "s"}\n'
    )
    recipe = Recipe((Source("docs", str(tmp_path / "in.jsonl"), "jsonl", "*", ()),), text_key="body", steps=("exact",))
    work = tmp_path / "work"
    for stage in stages_of(recipe, work, lambda *_: None):
        run_steps(list(stage.steps), stage.tasks)
    (data_set,) = gather(recipe, work, tmp_path / "out")
    assert json.loads(data_set.shards[0].read_text()) == {
        "text": "a b", "id": "docs/in.jsonl#1", "source": "docs", "copies": 1, "url": "u", "n": [1, {"a": None}],
        "original_text": "t", "original_source": "s",
    }  # fmt: skip
