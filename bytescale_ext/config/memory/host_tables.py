"""Settings of tables in host memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

from bytescale_ext.plan.activation.policies import in_gigabytes
from bytescale_ext.states.cache import CacheSettings


@dataclass(frozen=True)
class HostTables:
    """Tables in host memory, shared out over ranks, with a cache on each rank for each table.

    Attributes:
        cache: of a rank.
        rate: learning rate of row-wise Adagrad.
        fresh_steps: the first steps of a training, in which the bounds of the cache are 0.
    """

    cache: CacheSettings
    rate: float
    fresh_steps: int = 0

    def cache_in(self, step_index: int) -> CacheSettings:
        """Return the cache's settings in a step.

        Rows and what reads them change most in the first steps. Where workers learn these apart, the loss stays higher.
        """
        return self.cache if step_index >= self.fresh_steps else replace(self.cache, read_bound=0, write_bound=0)

    def num_bytes(self, num_rows: int, dim: int, num_ranks: int) -> int:
        """Return the host memory of one table and its cache on each of the ranks that share the table.

        A row is its float32 numbers, a sum of squares and a version of 64 bits. A line of the cache holds the numbers
        twice, two sums of squares and five counters; 32 bits for each row say where its line is.
        """
        own_rows = -(-num_rows // num_ranks)
        return own_rows * (4 * dim + 12) + self.cache.num_lines * (8 * dim + 48) + 4 * num_rows


@dataclass(frozen=True)
class EmbeddingConfig:
    """The embedding of the vocabulary in host memory.

    Attributes:
        host: how it is kept.
        num_rows: token ids, padded as Megatron does.
        dim: the hidden size.
    """

    host: HostTables
    num_rows: int
    dim: int


def check_host_room(what: str, needed: float, free: float, advice: str) -> None:
    """Raise ValueError where ``what`` takes more bytes of host memory of a process than are free, with the advice."""
    if needed > free:
        raise ValueError(
            f"{what} take {in_gigabytes(needed)} GB of each process's host memory, and there are {free / 1e9:.4g} GB: "
            f"{advice}"
        )
