"""Recipe of ``bytescale data clean``: sources and steps, read from a TOML file and flags."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from bytescale_ext.data.clean.repositories import repositories_in, repository_files
from bytescale_ext.data.samples.patterns import paths_below, paths_matching
from bytescale_ext.data.samples.sources import shown_files
from bytescale_ext.json_input import stored_text

_MOST: Final = 1_000_000  # hashes and other counts of a recipe
_MOST_TASKS: Final = 10_000  # each takes a process in each stage
_MOST_NAME: Final = 100  # letters; each may take several bytes in the name of a file
FORMATS: Final = ("auto", "text", "jsonl", "parquet", "warc", "repositories")
STEPS: Final = ("filters", "pii", "exact", "near", "sentences")
FILTERS: Final = ("gopher-quality", "gopher-repetition", "c4", "fineweb")
POLICIES: Final = ("drop", "weight")
CLASSIFIER: Final = "classifier"
"""Own step that needs no code (``classifiers.Classifier``)."""
ON_BAD: Final = ("skip", "fail")
_GLOBS: Final = {"jsonl": "*.jsonl*", "parquet": "*.parquet", "warc": "*.w*.gz"}
_SUFFIXES: Final = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".warc": "warc", ".wet": "warc"}
_DEFAULT_TASKS: Final = 32
_LEAST_SHARDS: Final = 32
_SHARD_BYTES: Final = 1 << 28


@dataclass(frozen=True, slots=True)
class Condition:
    """Condition for a key of a document. A document without the key does not meet it.

    Attributes:
        key: key or column, such as url, date or language.
        values: values of the key that are kept; empty: all between ``least`` and ``most``.
        least, most: smallest and largest value, both numbers or both texts (dates in ISO format); None: no limit. A
            text that begins with ``most`` is kept, so "2024" includes all days of 2024.
    """

    key: str
    values: tuple[str | int | float | bool, ...] = ()
    least: str | float | None = None
    most: str | float | None = None

    def is_met(self, keys: Mapping[str, object]) -> bool:
        """Return whether a document with these keys meets the condition."""
        value = keys.get(self.key)
        if self.values:
            return value in self.values
        return (self.least is None or _is_ordered(self.least, value)) and (
            self.most is None
            or _is_ordered(value, self.most)
            or (isinstance(value, str) and value.startswith(str(self.most)))
        )


def _is_ordered(first: object, second: object) -> bool:
    """Return whether two numbers or two texts are in ascending order."""
    if isinstance(first, str) and isinstance(second, str):
        return first <= second
    is_pair = isinstance(first, (int, float)) and isinstance(second, (int, float))
    return is_pair and first <= second  # type: ignore[operator]


@dataclass(frozen=True, slots=True)
class OwnStep:
    """A step of one's own.

    Attributes:
        use: ``package.module:name`` or ``path/to/file.py:name`` of a function, of a class of functions or of a step of
            datatrove; or ``CLASSIFIER``.
        options: further arguments, by name.
    """

    use: str
    options: tuple[tuple[str, object], ...] = ()


@dataclass(frozen=True, slots=True)
class Source:
    """One source of documents.

    Attributes:
        name: name in the report and the output.
        path: file, or folder of files, or of repositories.
        format: one of ``FORMATS``.
        glob: pattern of the files in a folder.
        filters: some of ``FILTERS``; a document that a filter rejects is dropped.
        keep: conditions; a document that does not meet all of them is dropped.
    """

    name: str
    path: str
    format: str
    glob: str
    filters: tuple[str, ...]
    keep: tuple[Condition, ...] = ()


@dataclass(frozen=True, slots=True)
class Recipe:
    """Settings that determine the cleaned documents.

    Attributes:
        sources: sources of documents.
        steps: enabled steps, some of ``STEPS``.
        policy: ``drop`` keeps one document of each cluster of duplicates; ``weight`` also gives it a larger weight.
        on_bad: ``skip`` or ``fail``, for unreadable lines and files and for repeated ids.
        text_key: key or column of the text.
        tasks: number of tasks among which shards are divided. It does not change the cleaned documents.
        ngram: number of words of a shingle.
        buckets: number of MinHash buckets.
        hashes: number of MinHash hashes per bucket.
        jaccard: smallest Jaccard similarity of duplicates, verified on all shingles.
        max_weight: largest weight of a document that represents many.
        sentences: number of consecutive sentences that are removed if they are repeated elsewhere.
        min_words: smallest number of words of these sentences together.
        own: own steps, which run after the filters.
        weight_key: key of a number that multiplies the weight of a document, such as the score of a classifier.
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
    own: tuple[OwnStep, ...] = ()
    weight_key: str = ""

    def fingerprint(self) -> str:
        """Return a hash of the recipe without tasks, and of the names, sizes and modification times of its files."""
        files = [(str(path), *size_of(path)) for _, path in files_of(self.sources)]
        return hashlib.sha256(json.dumps([self.settings(), files]).encode()).hexdigest()

    def settings(self) -> dict[str, object]:
        """Return the fields that determine the cleaned documents: all except ``tasks``."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name != "tasks"}


def read_recipe(path: Path | None, inputs: Sequence[str], overrides: Mapping[str, object]) -> Recipe:
    """Return the recipe of a TOML file, with values overridden by flags.

    Args:
        path: path of the file, or None if flags specify everything.
        inputs: sources as NAME=PATH, which replace the sources of the file.
        overrides: values by name of the field, or ``filters`` for all sources; None keeps the value of the file.

    Raises:
        ValueError: a value is unknown or invalid, or a source has no files.
    """
    values = _parsed(path) if path is not None else {}
    values |= {name: value for name, value in overrides.items() if value is not None}
    filters = values.pop("filters", [])
    in_file = values.pop("source", [])
    tables = [_named(words) for words in inputs] or in_file
    if not isinstance(tables, list) or not tables:
        raise ValueError("no sources: give --input NAME=PATH, or [[source]] tables in --recipe")
    own = values.pop("step", [])
    known = {field.name for field in dataclasses.fields(Recipe)} - {"sources", "own"}
    unknown = sorted(values.keys() - known)
    if unknown:
        raise ValueError(
            f"{path}: no setting {unknown[0]} (there are {', '.join(sorted(known))}, filters, [[source]], [[step]])"
        )
    sources = tuple(_source(table, filters) for table in tables)
    values["steps"] = tuple(_strings("steps", values.get("steps", STEPS), STEPS))
    values["own"] = tuple(_own(table) for table in (own if isinstance(own, list) else [own]))
    recipe = Recipe(sources, **values)  # type: ignore[arg-type]  # _check refuses values of wrong types
    _check(recipe)
    if "tasks" not in values:
        recipe = dataclasses.replace(recipe, tasks=min(len(files_of(sources)), _DEFAULT_TASKS))
    return recipe


def files_of(sources: Sequence[Source]) -> list[tuple[int, Path]]:
    """Return (number of the source, file or repository) of all files, in the order of the recipe.

    Raises:
        ValueError: a source does not exist or has no files.
    """
    numbered: list[tuple[int, Path]] = []
    for number, source in enumerate(sources):
        path = Path(source.path)
        if source.format == "repositories" and path.is_dir():
            repositories = repositories_in(path)
            if not repositories:
                raise ValueError(f"source {source.name}: {path}: has no folder, so no repository")
            numbered += [(number, repository) for repository in repositories]
            continue
        matches = [] if path.exists() else paths_matching(source.path)
        numbered += [(number, match) for match in matches if match.is_file()]
        if matches:
            continue
        if not path.exists():
            raise ValueError(f"source {source.name}: {path}: no such file or folder")
        files = [path] if path.is_file() else shown_files(paths_below(path, source.glob), path)
        if not files:
            raise ValueError(f"source {source.name}: no file below {path} matches {source.glob!r}: change its glob")
        numbered += [(number, file) for file in files]
    return numbered


def size_of(path: Path) -> tuple[int, int]:
    """Return the bytes of a file, or of the code of a repository, and its last modification in nanoseconds."""
    stats = [file.stat() for file in (repository_files(path) if path.is_dir() else [path])]
    return sum(stat.st_size for stat in stats), max((stat.st_mtime_ns for stat in stats), default=0)


def shards_of(sizes: Sequence[int]) -> np.ndarray:
    """Return the shard of each file: int64 [files]. Shards are numbered from 0 in the order of the files.

    A shard has consecutive files of about 1/32 of all bytes, or of about 256 MiB if that is less.

    Args:
        sizes: bytes of each file, [files].
    """
    ends = np.cumsum(sizes, dtype=np.int64) + np.arange(1, len(sizes) + 1)  # empty files count one byte
    shards = max(_LEAST_SHARDS, -(-int(ends[-1]) // _SHARD_BYTES))
    middle = (ends + np.append(0, ends[:-1])) / 2
    found: npt.NDArray[np.int64] = np.unique((middle * shards / ends[-1]).astype(np.int64), return_inverse=True)[1]
    return found


def _parsed(path: Path) -> dict[str, object]:
    try:
        return tomllib.loads(stored_text(path))
    except (ValueError, RecursionError) as error:  # TOMLDecodeError is a ValueError, and int() raises others
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise ValueError(f"{path}: not a recipe in TOML ({reason})") from error


def _named(words: str) -> dict[str, object]:
    name, _, path = words.partition("=")
    if not name or not path:
        raise ValueError(f"--input {words}: give NAME=PATH")
    return {"name": name, "path": path}


def _source(table: object, filters: object) -> Source:
    if not isinstance(table, dict) or not {"name", "path"} <= table.keys():
        raise ValueError("[[source]]: give name and path")
    unknown = sorted(table.keys() - {"name", "path", "format", "glob", "filters", "keep"})
    if unknown:
        raise ValueError(f"source {table['name']}: no setting {unknown[0]}")
    name, path = str(table["name"]), str(table["path"])
    if not name.replace("-", "").replace("_", "").isalnum() or len(name) > _MOST_NAME:
        raise ValueError(f"source {name[:_MOST_NAME]}: a name consists of up to {_MOST_NAME} letters, digits, - and _")
    guessed = next((kind for suffix, kind in _SUFFIXES.items() if suffix in Path(path).suffixes), "auto")
    kind = str(table.get("format", guessed))
    if kind not in FORMATS:
        raise ValueError(f"source {name}: no format {kind} (there are {', '.join(FORMATS)})")
    names = _strings(f"source {name}: filters", table.get("filters", filters), FILTERS)
    keep = _conditions(name, table.get("keep", {}))
    return Source(name, path, kind, str(table.get("glob", _GLOBS.get(kind, "*"))), tuple(names), keep)


def _conditions(source: str, table: object) -> tuple[Condition, ...]:
    """Return the conditions of a source. Raises ValueError for other than lists and ranges of values."""
    if not isinstance(table, dict):
        raise ValueError(f'source {source}: keep: give a table such as {{ language = ["en"] }}')
    conditions = []
    for key, value in table.items():
        if isinstance(value, list) and value and all(isinstance(each, (str, int, float)) for each in value):
            conditions.append(Condition(key, tuple(value)))
            continue
        is_range = isinstance(value, dict) and value and value.keys() <= {"least", "most"}
        if not is_range or len({isinstance(limit, str) for limit in value.values()}) != 1:
            raise ValueError(
                f"source {source}: keep: {key}: give a list of values, or numbers or texts as least and most, such as "
                '{ least = "2020", most = "2024" }'
            )
        conditions.append(Condition(key, (), value.get("least"), value.get("most")))
    return tuple(conditions)


def _own(table: object) -> OwnStep:
    """Return an own step. Raises ValueError for a table without ``use``."""
    use = table.get("use") if isinstance(table, dict) else None
    if not isinstance(table, dict) or not isinstance(use, str) or (":" not in use and use != CLASSIFIER):
        raise ValueError('[[step]]: give use = "classifier", "package.module:name" or "path/to/file.py:name"')
    options = {key: value for key, value in table.items() if key != "use"}
    return OwnStep(use, tuple(options.items()))


def _strings(setting: str, values: object, known: Sequence[str]) -> list[str]:
    """Return the known names that ``values`` lists. Raises ValueError for another name or type."""
    if not isinstance(values, (list, tuple)) or not all(isinstance(value, str) for value in values):
        raise ValueError(f"{setting}: give a list of {', '.join(known)}")
    unknown = [value for value in values if value not in known]
    if unknown:
        raise ValueError(f"{setting}: no {unknown[0]} (there are {', '.join(known)})")
    return [name for name in known if name in values]


def _check(recipe: Recipe) -> None:
    names = [source.name for source in recipe.sources]
    if len(set(names)) < len(names):
        raise ValueError(f"two sources are called {max(names, key=names.count)}: give them different names")
    if "near" in recipe.steps and "exact" not in recipe.steps:
        raise ValueError("steps: near needs exact, because equal documents are near-duplicates too: add exact")
    for name, known in (("policy", POLICIES), ("on_bad", ON_BAD)):
        if getattr(recipe, name) not in known:
            raise ValueError(f"{name} {getattr(recipe, name)}: give one of {', '.join(known)}")
    for name in ("tasks", "ngram", "buckets", "hashes", "sentences", "min_words"):
        value = getattr(recipe, name)
        limit = _MOST_TASKS if name == "tasks" else _MOST
        if type(value) is not int or not 1 <= value <= limit:
            raise ValueError(f"{name} {value}: give a whole number of 1 or more, at most {limit:,}")
    for name in ("weight_key", "text_key"):
        if not isinstance(getattr(recipe, name), str):
            raise ValueError(f"{name} {getattr(recipe, name)}: give the name of a key")
    for name, least, most in (("jaccard", 0.0, 1.0), ("max_weight", 1.0, 100.0)):
        value = getattr(recipe, name)
        if type(value) not in (int, float) or not least <= value <= most:
            raise ValueError(f"{name} {value}: give a number from {least:g} to {most:g}")
