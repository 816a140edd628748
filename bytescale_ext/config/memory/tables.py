"""Settings of n-gram tables, and of tables in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from bytescale_ext.data.samples.grams import GramRule
from bytescale_ext.plan.activation.policies import in_gigabytes
from bytescale_ext.states.cache import CacheSettings


@dataclass(frozen=True)
class HostTables:
    """Tables in host memory. Their rows are distributed over ranks, and each rank has a cache for each table.

    Attributes:
        cache: cache settings of a rank.
        rate: learning rate of row-wise Adagrad.
        fresh_steps: number of first steps during which the read and write bounds of the cache are 0.
    """

    cache: CacheSettings
    rate: float
    fresh_steps: int = 0

    def cache_in(self, step_index: int) -> CacheSettings:
        """Return the cache settings in a step.

        Rows and the weights that use them change most in the first steps. If workers do not synchronize them then, the
        loss stays higher.
        """
        return self.cache if step_index >= self.fresh_steps else replace(self.cache, read_bound=0, write_bound=0)

    def num_bytes(self, num_rows: int, dim: int, num_ranks: int) -> int:
        """Return the bytes of host memory of one table and its cache, on each of the ranks that share the table.

        A row has float32 numbers, a sum of squares and a 64-bit version. A cache line contains the numbers twice, two
        sums of squares and five counters. In addition, 32 bits per row of the table give the location of its line.
        """
        own_rows = -(-num_rows // num_ranks)
        return own_rows * (4 * dim + 12) + self.cache.num_lines * (8 * dim + 48) + 4 * num_rows


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


@dataclass(frozen=True)
class EmbeddingConfig:
    """Vocabulary embedding in host memory.

    Attributes:
        host: settings of the table.
        num_rows: size of the vocabulary, with Megatron's padding.
        dim: hidden size.
    """

    host: HostTables
    num_rows: int
    dim: int


@dataclass(frozen=True)
class TablesConfig:
    """The tables of a run.

    Attributes:
        ngram: n-gram tables, or None.
        embedding: vocabulary embedding in host memory, or None.
    """

    ngram: NgramConfig | None = None
    embedding: EmbeddingConfig | None = None

    def host_bytes(self, stage_layers: Sequence[int], num_ranks: int) -> int:
        """Return the host memory of tables and caches on a rank of the fullest stage.

        Args:
            stage_layers: transformer layers of each stage, in order; the first stage has the embedding.
            num_ranks: ranks that divide each table.
        """
        stages = [0] * len(stage_layers)
        if self.ngram is not None and self.ngram.host is not None:
            each = self.ngram.host.num_bytes(self.ngram.rule.num_rows, self.ngram.dim, num_ranks)
            stages = [count * each for count in memories_of_stages(self.ngram.layers, stage_layers)]
        if self.embedding is not None:
            stages[0] += self.embedding.host.num_bytes(self.embedding.num_rows, self.embedding.dim, num_ranks)
        return max(stages)


def memories_of_stages(layers: Sequence[int], stage_layers: Sequence[int]) -> list[int]:
    """Return the number of selected layers on each pipeline stage.

    Args:
        layers: numbers of the selected layers in the whole model, counted from 1.
        stage_layers: number of transformer layers of each stage.
    """
    ends = accumulate(stage_layers)
    return [sum(end - count < layer <= end for layer in layers) for end, count in zip(ends, stage_layers, strict=True)]


def check_host_room(needed: float, free: float, advice: str) -> None:
    """Raise ValueError, with the advice, if tables need more host memory than a process has. Sizes are in bytes."""
    if needed > free:
        raise ValueError(
            f"tables in host memory and their caches take {in_gigabytes(needed)} GB of each process's host memory, but "
            f"there are {free / 1e9:.4g} GB: {advice}"
        )
