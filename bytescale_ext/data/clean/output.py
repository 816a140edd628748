"""Files of cleaned documents: parts written by tasks, and the final shards of each data set."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import IO

import numpy as np
from datatrove.data import DocumentsPipeline
from datatrove.pipeline.base import PipelineStep

from bytescale_ext.data.clean.duplicates import weights_of
from bytescale_ext.data.clean.recipe import Recipe
from bytescale_ext.data.clean.tally import Tally
from bytescale_ext.new_file import make_folder, new_log


@dataclass(frozen=True, slots=True)
class DataSet:
    """Documents of one source with equal weight.

    Attributes:
        name: name of the folder of shards, and prefix of the tokenized data set.
        source: source of the documents.
        weight: weight of each document.
        shards: the ``.jsonl`` files.
    """

    name: str
    source: str
    weight: float
    shards: tuple[Path, ...]


class Write(PipelineStep):  # type: ignore[misc]  # datatrove has no types
    """Writes the documents of a task to one part for each shard and data set."""

    name = "write"
    type = "writer"

    def __init__(self, recipe: Recipe, work: Path, at_end: Callable[[int], None] | None = None) -> None:
        super().__init__()
        self.recipe = recipe
        self.work = work
        self.at_end = at_end

    def run(self, data: DocumentsPipeline, rank: int = 0, world_size: int = 1) -> None:
        """Write the parts of a task, replacing parts of an earlier attempt, and their tally."""
        tally = Tally()
        for shard, documents in groupby(data, lambda document: int(document.metadata["shard"])):
            self._write_shard(documents, self.work / "parts" / f"{shard:05d}", tally)
        tally.save(self.work / "tallies" / f"write-{rank:05d}.json")
        if self.at_end is not None:
            self.at_end(rank)

    def _write_shard(self, documents: DocumentsPipeline, folder: Path, tally: Tally) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        streams: dict[str, IO[str]] = {}
        try:
            for document in documents:
                source, copies = str(document.metadata["source"]), int(document.metadata["copies"])
                weight = self._weight(copies, document.metadata.get("keys", {}))
                name = data_set_name(source, weight)
                if name not in streams:
                    streams[name] = new_log(folder / f"{name}.jsonl")
                own = {"text": document.text, "id": document.id, "source": source, "copies": copies}
                values = {**own, **with_other_names(document.metadata.get("keys", {}), own)}
                streams[name].write(json.dumps(values, ensure_ascii=True) + "\n")
                tally.add(source, "kept", num_bytes=len(document.text.encode("utf-8", "surrogatepass")))
                tally.add(source, f"weight {weight:.2f}")
        finally:
            for stream in streams.values():
                stream.close()

    def _weight(self, copies: int, keys: Mapping[str, object]) -> float:
        """Return the weight of a document. Raises ValueError if its ``weight_key`` is no positive number."""
        weight = 1.0
        if self.recipe.policy == "weight":
            weight = float(weights_of(np.array([copies]), self.recipe.max_weight)[0])
        if self.recipe.weight_key:
            factor = keys.get(self.recipe.weight_key)
            if not isinstance(factor, (int, float)) or not factor >= 0:
                raise ValueError(f"weight_key {self.recipe.weight_key}: a document has {factor!r}, not a number")
            weight = min(max(round(4 * weight * factor), 1) / 4, self.recipe.max_weight)
        return weight


def with_other_names(keys: Mapping[str, object], own: Mapping[str, object]) -> dict[str, object]:
    """Return the keys of a document in its source; ``original_`` begins a key that the output has, too."""
    return {f"original_{key}" if key in own else key: value for key, value in keys.items()}


def data_set_name(source: str, weight: float) -> str:
    """Return the name of the data set of a source's documents with this weight."""
    return source if weight == 1 else f"{source}-x{weight:.2f}"


def gather(recipe: Recipe, work: Path, output: Path) -> list[DataSet]:
    """Move the parts of all shards to ``output``/NAME/00000.jsonl and so on, and return the data sets.

    A repeated call moves the parts that an interrupted call has left.
    """
    for part in sorted((work / "parts").glob("*/*.jsonl")):
        shard = output / part.stem / f"{part.parent.name}.jsonl"
        make_folder(shard.parent, output)
        os.replace(part, shard)
    data_sets: dict[str, DataSet] = {}
    for source in recipe.sources:
        for step in np.arange(0.25, recipe.max_weight + 0.25, 0.25).tolist():
            weight = min(step, recipe.max_weight)
            name = data_set_name(source.name, weight)
            shards = tuple(sorted((output / name).glob("*.jsonl")))
            if shards and name not in data_sets:
                data_sets[name] = DataSet(name, source.name, weight, shards)
    return list(data_sets.values())
