"""Texts with known duplicates, and functions that run the steps of a stage in this process."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from pathlib import Path

import numpy as np
from datatrove.data import Document

from bytescale_ext.data.clean.recipe import Recipe, Source
from bytescale_ext.data.clean.stages import stages_of
from bytescale_ext.data.clean.tally import Tally, merged
from bytescale_ext.data.tasks.stages import Stage

HEADER = (
    "Permission is hereby granted, free of charge, to any person\n"
    "obtaining a copy of this software and associated files,\n"
    "to deal in the software without restriction of any kind.\n"
)
_SYLLABLES = "ka lo mi ru se to na vi pe do ga hu".split()


def words(count: int, seed: int) -> list[str]:
    """Return random words of a large vocabulary, so that texts of different seeds share few runs."""
    random = np.random.RandomState(seed)
    return ["".join(random.choice(_SYLLABLES, 3)) for _ in range(count)]


def text(seed: int, count: int = 200, changed: int | None = None) -> str:
    """Return a text in lines of ten random words; ``changed``: a word to replace."""
    made = words(count, seed)
    if changed is not None:
        made[changed] = "altered"
    return "\n".join(" ".join(made[place : place + 10]) for place in range(0, count, 10))


def document(body: str, name: str = "a", source: str = "docs", **more: object) -> Document:
    """Return a document of a source."""
    return Document(body, name, metadata={"source": source, "shard": 0, **more})


def folder_of(root: Path, name: str, bodies: dict[str, str]) -> Source:
    """Write texts to a folder and return it as a source."""
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    for file, body in bodies.items():
        (folder / file).write_text(body, encoding="utf-8")
    return Source(name, str(folder), "text", "*", ())


def run_steps(steps: list[Callable[..., object]], tasks: int = 1) -> list[object]:
    """Run steps like an executor, task after task, and return the documents that the last step yields."""
    found: list[object] = []
    for rank in range(tasks):
        piped: object = None
        for step in steps:
            piped = step(piped, rank, tasks)
        if piped is not None:
            found += deque(piped)  # type: ignore[call-overload]
    return found


def run_recipe(recipe: Recipe, work: Path) -> list[Stage]:
    """Run all stages except the last in this process."""
    stages = stages_of(recipe, work, print)[:-1]
    for stage in stages:
        run_steps(stage.steps, stage.tasks)
    return stages


def duplicates(work: Path) -> list[dict[str, object]]:
    """Return the lines of the duplicates of all tasks."""
    paths = sorted((work / "duplicates").glob("*.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def told(work: Path) -> Tally:
    """Return the sum of the tallies of all tasks."""
    return merged((work / "tallies").glob("*.json"))
