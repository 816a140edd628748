"""Settings of n-gram memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from bytescale_ext.config.memory.host_tables import HostTables
from bytescale_ext.data.samples.grams import GramRule


@dataclass(frozen=True)
class NgramConfig:
    """Tables of embeddings of n-grams, one for each of some layers.

    Attributes:
        layers: numbers of these layers in the whole model, from 1.
        rule: which rows belong to a token; the same in all tables.
        dim: numbers of a row.
        seed: of the values before training.
        host: the tables are in host memory; None: they are parameters.
    """

    layers: tuple[int, ...]
    rule: GramRule
    dim: int
    seed: int
    host: HostTables | None = None

    def num_parameters(self, hidden: int) -> int:
        """Return the parameters of one layer's memory in a model of this hidden size, without a table on the host."""
        table = 0 if self.host else self.rule.num_rows * self.dim
        return table + 2 * hidden * self.rule.num_columns * self.dim

    def stage_parameters(self, hidden: int, stage_layers: Sequence[int]) -> list[int]:
        """Return the parameters of the memories of each pipeline stage, on every rank of it.

        ``stage_layers``: transformer layers of each stage, which follow each other.
        """
        return [count * self.num_parameters(hidden) for count in memories_of_stages(self.layers, stage_layers)]


def memories_of_stages(layers: Sequence[int], stage_layers: Sequence[int]) -> list[int]:
    """Return how many of these layers of the model, numbered from 1, each pipeline stage has."""
    ends = accumulate(stage_layers)
    return [sum(end - count < layer <= end for layer in layers) for end, count in zip(ends, stage_layers, strict=True)]
