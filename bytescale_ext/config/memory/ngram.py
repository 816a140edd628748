"""Settings of n-gram memory."""

from __future__ import annotations

from dataclasses import dataclass

from bytescale_ext.data.samples.grams import GramRule
from bytescale_ext.plan.activation.policies import in_gigabytes
from bytescale_ext.states.cache import CacheSettings


@dataclass(frozen=True)
class HostTables:
    """Tables in host memory, shared out over ranks, with a cache on each rank for each table.

    Attributes:
        cache: of a rank.
        rate: learning rate of row-wise Adagrad.
    """

    cache: CacheSettings
    rate: float

    def num_bytes(self, rule: GramRule, dim: int, num_ranks: int) -> int:
        """Return the host memory of one table and its cache on each of the ranks that share the table.

        A row is its float32 numbers, a sum of squares and a version of 64 bits. A line of the cache holds the numbers
        twice, a sum of squares and five counters; 32 bits for each row say where its line is.
        """
        own_rows = -(-rule.num_rows // num_ranks)
        return own_rows * (4 * dim + 12) + self.cache.num_lines * (8 * dim + 44) + 4 * rule.num_rows

    def check_fits(self, needed: float, free: float) -> None:
        """Raise ValueError where a process needs more host memory than is free, naming how much."""
        if needed > free:
            raise ValueError(
                f"n-gram tables and caches of a process take {in_gigabytes(needed)} GB of host memory, and there are "
                f"{free / 1e9:.4g} GB: lower --ngram-rows, --ngram-dim or --ngram-cache-rows, or use more ranks"
            )


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
