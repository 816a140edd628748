"""Settings of tables in host memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

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


def check_host_room(what: str, needed: float, free: float, advice: str) -> None:
    """Raise ValueError, with the advice, if ``what`` needs more host memory than a process has. Sizes are in bytes."""
    if needed > free:
        raise ValueError(
            f"{what} take {in_gigabytes(needed)} GB of each process's host memory, but there are {free / 1e9:.4g} GB: "
            f"{advice}"
        )
