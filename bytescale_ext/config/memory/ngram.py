"""Settings of n-gram memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from bytescale_ext.config.memory.host_tables import HostTables
from bytescale_ext.data.samples.grams import GramRule


@dataclass(frozen=True)
class NgramConfig:
    """Tables of n-gram embeddings. Each selected layer has one table.

    Attributes:
        layers: numbers of the selected layers in the whole model, counted from 1.
        rule: rule that maps tokens to rows, equal for all tables.
        dim: length of a row.
        seed: seed of the initial values.
        host: settings of tables in host memory; None if tables are parameters of the model.
    """

    layers: tuple[int, ...]
    rule: GramRule
    dim: int
    seed: int
    host: HostTables | None = None

    def num_parameters(self, hidden: int) -> int:
        """Return the number of parameters of one layer's n-gram memory, without a table in host memory."""
        table = 0 if self.host else self.rule.num_rows * self.dim
        return table + 2 * hidden * self.rule.num_columns * self.dim

    def stage_parameters(self, hidden: int, stage_layers: Sequence[int]) -> list[int]:
        """Return the number of n-gram parameters of each pipeline stage, on every rank of the stage.

        ``stage_layers``: number of transformer layers of each stage.
        """
        return [count * self.num_parameters(hidden) for count in memories_of_stages(self.layers, stage_layers)]


def memories_of_stages(layers: Sequence[int], stage_layers: Sequence[int]) -> list[int]:
    """Return the number of selected layers on each pipeline stage.

    Args:
        layers: numbers of the selected layers in the whole model, counted from 1.
        stage_layers: number of transformer layers of each stage.
    """
    ends = accumulate(stage_layers)
    return [sum(end - count < layer <= end for layer in layers) for end, count in zip(ends, stage_layers, strict=True)]
