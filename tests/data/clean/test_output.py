"""Parts, shards and weights."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path

import pytest

from bytescale_ext.data.clean.output import Write, gather
from bytescale_ext.data.clean.recipe import Recipe, Source
from tests.data.cleaning import document, run_steps, told

SOURCES = tuple(Source(name, ".", "text", "*", ()) for name in ("docs", "code"))
MADE = [document("one", "a", copies=1), document("two", "b", copies=2), document("three", "c", "code", copies=100)]


def write(recipe: Recipe, work: Path, tasks: int = 1) -> None:
    run_steps([lambda _, rank, world: iter(MADE[rank::world]), Write(recipe, work)], tasks)


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
