"""Recipe: its file, flags that override it, and refusals in one line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bytescale_ext.data.clean.recipe import FILTERS, files_of, read_recipe
from tests.data.cleaning import folder_of

RECIPE = """
steps = ["exact", "near"]
filters = ["fineweb"]
jaccard = 0.7
policy = "weight"

[[source]]
name = "docs"
path = "{root}/docs"

[[source]]
name = "chats"
path = "{root}/chats.jsonl"
filters = []
"""


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    folder_of(tmp_path, "docs", {"b.txt": "b", "a.txt": "a", ".hidden": "c"})
    (tmp_path / "chats.jsonl").write_text('{"text": "x"}\n')
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE.format(root=tmp_path))
    return path


def test_a_recipe_says_sources_and_settings(recipe_file: Path) -> None:
    recipe = read_recipe(recipe_file, [], {})
    docs, chats = recipe.sources
    assert (docs.name, docs.format, docs.filters) == ("docs", "auto", ("fineweb",))
    assert (chats.format, chats.filters) == ("jsonl", ())
    assert (recipe.steps, recipe.jaccard, recipe.policy) == (("exact", "near"), 0.7, "weight")
    assert [path.name for _, path in files_of(recipe.sources)] == ["a.txt", "b.txt", "chats.jsonl"]
    assert recipe.tasks == 3


def test_flags_stand_over_the_file(recipe_file: Path) -> None:
    given = {"jaccard": 0.9, "steps": ["sentences", "exact"], "filters": ["c4"], "tasks": 2, "policy": None}
    recipe = read_recipe(recipe_file, [f"one={recipe_file.parent / 'docs'}"], given)
    assert [source.name for source in recipe.sources] == ["one"]
    assert recipe.sources[0].filters == ("c4",)
    assert (recipe.jaccard, recipe.steps, recipe.tasks) == (0.9, ("exact", "sentences"), 2)
    assert recipe.policy == "weight"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a.jsonl.gz", "jsonl"),
        ("a.parquet", "parquet"),
        ("a.warc.gz", "warc"),
        ("a.warc.wet.gz", "warc"),
        ("a", "auto"),
        ("a.ndjson.zst", "jsonl"),
    ],
)
def test_formats_follow_from_names(name: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"")
    assert read_recipe(None, [f"one={tmp_path / name}"], {}).sources[0].format == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"policy": "keep"}, "policy keep: give one of drop, weight"),
        ({"steps": ["near"]}, "near needs exact"),
        ({"steps": ["nearly"]}, "steps: no nearly (there are filters, pii"),
        ({"steps": "near"}, "steps: give a list of"),
        ({"jaccard": 1.5}, "jaccard 1.5: give a number from 0 to 1"),
        ({"max_weight": 0.5}, "max_weight 0.5: give a number from 1"),
        ({"tasks": 0}, "tasks 0: give a whole number"),
        ({"tasks": 1_000_000}, "tasks 1000000: give a whole number of 1 or more, at most 10,000"),
        ({"jaccard": True}, "jaccard True: give a number"),
        ({"buckets": "many"}, "buckets many: give a whole number"),
        ({"on_bad": "cry"}, "on_bad cry"),
        ({"bukets": 3}, "no setting bukets"),
        ({"filters": ["gopher"]}, f"no gopher (there are {', '.join(FILTERS)})"),
    ],
)
def test_bad_values_are_refused(change: dict[str, object], message: str, tmp_path: Path) -> None:
    folder_of(tmp_path, "docs", {"a.txt": "a"})
    with pytest.raises(ValueError, match=re.escape(message)):
        read_recipe(None, [f"docs={tmp_path / 'docs'}"], change)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([], "no sources"),
        (["docs"], "--input docs: give NAME=PATH"),
        (["docs=/no/such/place"], "source docs: /no/such/place: no such file or folder"),
        (["do cs=."], "source do cs: a name consists of"),
        ([f"{'n' * 101}=."], "n: a name consists of up to 100 letters"),
    ],
)
def test_bad_sources_are_refused(inputs: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_recipe(None, inputs, {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("steps = [", "not a recipe in TOML"),
        ('[[source]]\nname = "a"', "give name and path"),
        ('[[source]]\nname = "a"\npath = "."\nkind = "x"', "source a: no setting kind"),
        ('[[source]]\nname = "a"\npath = "."\nformat = "pdf"', "source a: no format pdf"),
        ('[[source]]\nname = "a"\npath = "."\n[[source]]\nname = "a"\npath = "."', "two sources are called a"),
        ('[[source]]\nname = "a"\npath = "."\nglob = "*.none"', "no file below . matches"),
        ('[[source]]\nname = "a"\npath = "."\nglob = "/etc/*"', "'/etc/\\*' is no pattern for the files below"),
        ('[[source]]\nname = "a"\npath = "."\nformat = "repositories"', "has no folder, so no repository"),
    ],
)
def test_bad_files_are_refused(text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_recipe(path, [], {})
