"""The recipe of ``bytescale data clean``: its sources and steps, as a TOML file and flags say them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

FORMATS: Final = ("text", "jsonl", "parquet", "warc")
STEPS: Final = ("filters", "pii", "exact", "near", "sentences")
FILTERS: Final = ("gopher-quality", "gopher-repetition", "c4", "fineweb")
POLICIES: Final = ("drop", "weight")
ON_BAD: Final = ("skip", "fail")
_GLOBS: Final = {"text": "*", "jsonl": "*.jsonl*", "parquet": "*.parquet", "warc": "*.w*.gz"}
_SUFFIXES: Final = {".jsonl": "jsonl", ".parquet": "parquet", ".warc": "warc", ".wet": "warc"}
_DEFAULT_TASKS: Final = 32


@dataclass(frozen=True, slots=True)
class Source:
    """One source of documents.

    Attributes:
        name: what the report and the output call it.
        path: a file, or a folder of files.
        format: of ``FORMATS``.
        glob: which files of a folder.
        filters: of ``FILTERS``; a document that one refuses is dropped.
    """

    name: str
    path: str
    format: str
    glob: str
    filters: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that decides the cleaned documents.

    Attributes:
        sources: where documents come from.
        steps: of ``STEPS``, those that are on.
        policy: keep one of each cluster of duplicates; or keep one and weigh it.
        on_bad: what happens to lines and files that cannot be read, and to equal ids.
        text_key: key or column of the text.
        tasks: parts that the files are dealt to, which several processes work on.
        ngram: words of a shingle.
        buckets, hashes: of MinHash.
        jaccard: least similarity of duplicates, verified on all shingles.
        max_weight: of a document that stands for many.
        sentences: how many in a row must be repeated elsewhere to be removed.
        min_words: that these have together.
    """

    sources: tuple[Source, ...]
    steps: tuple[str, ...] = STEPS
    policy: str = "drop"
    on_bad: str = "skip"
    text_key: str = "text"
    tasks: int = 1
    ngram: int = 5
    buckets: int = 14
    hashes: int = 8
    jaccard: float = 0.8
    max_weight: float = 3.0
    sentences: int = 3
    min_words: int = 12

    def fingerprint(self) -> str:
        """Return a hash of the recipe and of the names, sizes and times of its files."""
        files = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for _, path in files_of(self.sources)]
        return hashlib.sha256(json.dumps([dataclasses.asdict(self), files]).encode()).hexdigest()


def read_recipe(path: Path | None, inputs: Sequence[str], overrides: Mapping[str, object]) -> Recipe:
    """Return the recipe of a TOML file, with flags in place of its values.

    Args:
        path: the file; None where flags say all.
        inputs: sources as NAME=PATH; they replace those of the file.
        overrides: values by the names of the fields, ``filters`` for all sources; None is not given.

    Raises:
        ValueError: a value is unknown or bad, or a source holds no files.
    """
    values = _parsed(path) if path is not None else {}
    values |= {name: value for name, value in overrides.items() if value is not None}
    filters = values.pop("filters", [])
    found = values.pop("source", [])
    given = [_named(one) for one in inputs] or found
    if not isinstance(given, list) or not given:
        raise ValueError("no sources: give --input NAME=PATH, or [[source]] tables in --recipe")
    known = {field.name for field in dataclasses.fields(Recipe)} - {"sources"}
    unknown = sorted(values.keys() - known)
    if unknown:
        raise ValueError(f"{path}: no setting {unknown[0]} (there are {', '.join(sorted(known))}, filters, [[source]])")
    sources = tuple(_source(one, filters) for one in given)
    values["steps"] = tuple(_strings("steps", values.get("steps", STEPS), STEPS))
    recipe = Recipe(sources, **values)  # type: ignore[arg-type]  # _check refuses values of wrong types
    _check(recipe)
    if "tasks" not in values:
        recipe = dataclasses.replace(recipe, tasks=min(len(files_of(sources)), _DEFAULT_TASKS))
    return recipe


def files_of(sources: Sequence[Source]) -> list[tuple[int, Path]]:
    """Return the files of all sources, each with the number of its source, in the order of the recipe.

    Raises:
        ValueError: a source does not exist or has no files.
    """
    found: list[tuple[int, Path]] = []
    for number, source in enumerate(sources):
        path = Path(source.path)
        if not path.exists():
            raise ValueError(f"source {source.name}: {path}: no such file or folder")
        files = [path] if path.is_file() else _in_folder(path, source.glob)
        if not files:
            raise ValueError(f"source {source.name}: no file below {path} matches {source.glob!r}: change its glob")
        found += [(number, one) for one in files]
    return found


def _in_folder(root: Path, pattern: str) -> list[Path]:
    files = (path for path in root.rglob(pattern) if path.is_file())
    shown = (path for path in files if not any(part.startswith(".") for part in path.relative_to(root).parts))
    return sorted(shown, key=lambda path: path.relative_to(root).as_posix())


def _parsed(path: Path) -> dict[str, object]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a recipe in TOML ({error})") from error


def _named(words: str) -> dict[str, object]:
    name, _, path = words.partition("=")
    if not name or not path:
        raise ValueError(f"--input {words}: give NAME=PATH")
    return {"name": name, "path": path}


def _source(table: object, filters: object) -> Source:
    if not isinstance(table, dict) or not {"name", "path"} <= table.keys():
        raise ValueError("[[source]]: give name and path")
    unknown = sorted(table.keys() - {"name", "path", "format", "glob", "filters"})
    if unknown:
        raise ValueError(f"source {table['name']}: no setting {unknown[0]}")
    name, path = str(table["name"]), str(table["path"])
    if not name.replace("-", "").replace("_", "").isalnum():
        raise ValueError(f"source {name}: a name consists of letters, digits, - and _")
    guessed = next((kind for suffix, kind in _SUFFIXES.items() if suffix in Path(path).suffixes), "text")
    kind = str(table.get("format", guessed))
    if kind not in FORMATS:
        raise ValueError(f"source {name}: no format {kind} (there are {', '.join(FORMATS)})")
    chosen = _strings(f"source {name}: filters", table.get("filters", filters), FILTERS)
    return Source(name, path, kind, str(table.get("glob", _GLOBS[kind])), tuple(chosen))


def _strings(what: str, values: object, known: Sequence[str]) -> list[str]:
    if not isinstance(values, (list, tuple)) or not all(isinstance(one, str) for one in values):
        raise ValueError(f"{what}: give a list of {', '.join(known)}")
    bad = [one for one in values if one not in known]
    if bad:
        raise ValueError(f"{what}: no {bad[0]} (there are {', '.join(known)})")
    return [str(one) for one in known if one in values]


def _check(recipe: Recipe) -> None:
    names = [source.name for source in recipe.sources]
    if len(set(names)) < len(names):
        raise ValueError(f"two sources are called {max(names, key=names.count)}: give them different names")
    if "near" in recipe.steps and "exact" not in recipe.steps:
        raise ValueError("steps: near without exact: equal documents are the nearest of all; add exact")
    for name, known in (("policy", POLICIES), ("on_bad", ON_BAD)):
        if getattr(recipe, name) not in known:
            raise ValueError(f"{name} {getattr(recipe, name)}: give one of {', '.join(known)}")
    for name in ("tasks", "ngram", "buckets", "hashes", "sentences", "min_words"):
        value = getattr(recipe, name)
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} {value}: give a whole number of 1 or more")
    for name, least, most in (("jaccard", 0.0, 1.0), ("max_weight", 1.0, 100.0)):
        value = getattr(recipe, name)
        if not isinstance(value, (int, float)) or not least <= value <= most:
            raise ValueError(f"{name} {value}: give a number from {least:g} to {most:g}")
