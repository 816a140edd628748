"""A plan as columns of integers: what is checked and hashed, whichever way the plan is kept.

Built from the micro-batches as they are, right or wrong, or by a plan that is kept as arrays from those arrays.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from bytescale_ext.plan.shapes import MicroBatch

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class PlanTable:
    """Micro-batches (rows) in the order of ranks, their shards in memory order, and the ranges of the shards.

    Attributes:
        counts: micro-batches of each rank: [ranks].
        offloads: of each micro-batch: [rows].
        shard_rows: the row of each shard: [shards].
        seqs: its sequence: [shards].
        ring_firsts, ring_widths: the first rank of its ring and how many it has (-1 and 0 for no ring): [shards].
        odd_rings: shards whose ring is no run of contiguous ascending ranks, with that ring.
        num_ranges: ranges of each shard: [shards].
        starts, stops: of each range: [ranges].
    """

    counts: Ints
    offloads: Floats
    shard_rows: Ints
    seqs: Ints
    ring_firsts: Ints
    ring_widths: Ints
    odd_rings: dict[int, tuple[int, ...]]
    num_ranges: Ints
    starts: Ints
    stops: Ints

    @cached_property
    def row_ranks(self) -> Ints:
        """The rank of each row: [rows]."""
        return np.repeat(np.arange(len(self.counts)), self.counts)

    @cached_property
    def row_indices(self) -> Ints:
        """Which micro-batch of its rank a row is: [rows]."""
        return np.arange(len(self.row_ranks)) - np.repeat(np.cumsum(self.counts) - self.counts, self.counts)

    @cached_property
    def range_shards(self) -> Ints:
        """The shard of each range: [ranges]."""
        return np.repeat(np.arange(len(self.seqs)), self.num_ranges)

    @cached_property
    def first_ranges(self) -> Ints:
        """The first range of each shard: [shards]."""
        return np.asarray(np.cumsum(self.num_ranges) - self.num_ranges)

    @cached_property
    def tokens(self) -> Ints:
        """Tokens of each shard: [shards]."""
        sums = np.append(0, np.cumsum(self.stops - self.starts))
        return np.asarray(sums[self.first_ranges + self.num_ranges] - sums[self.first_ranges])

    def where(self, shard: int) -> tuple[int, int]:
        """(rank, micro-batch) of a shard."""
        row = int(self.shard_rows[shard])
        return int(self.row_ranks[row]), int(self.row_indices[row])

    def ring(self, shard: int) -> tuple[int, ...]:
        """The ring of a shard."""
        first, width = int(self.ring_firsts[shard]), int(self.ring_widths[shard])
        return self.odd_rings.get(shard, tuple(range(first, first + width)))

    def digest(self, num_ranks: int, tokens_per_rank: int, lengths: Sequence[int], aligned: bool) -> str:
        """sha256 (first 16 hex digits) of all columns as little-endian 64-bit numbers."""
        odd = [number for shard, ring in sorted(self.odd_rings.items()) for number in (shard, len(ring), *ring)]
        columns = (
            self.counts, self.shard_rows, self.seqs, self.ring_firsts, self.ring_widths, self.num_ranges, self.starts,
            self.stops, odd, lengths, (num_ranks, tokens_per_rank, int(aligned)),
        )  # fmt: skip
        digest = hashlib.sha256()
        for column in columns:
            numbers = np.asarray(column, dtype="<i8")
            digest.update(np.array([len(numbers)], dtype="<i8").tobytes() + numbers.tobytes())
        digest.update(self.offloads.astype("<f8").tobytes())
        return digest.hexdigest()[:16]


@runtime_checkable
class Tabled(Protocol):
    """Ranks that know their table without making micro-batches."""

    @property
    def table(self) -> PlanTable: ...


def table_of(ranks: Sequence[tuple[MicroBatch, ...]]) -> PlanTable:
    """The table of ``StepPlan.ranks``."""
    if isinstance(ranks, Tabled):
        return ranks.table
    rows = [micro_batch for rank in ranks for micro_batch in rank]
    shards = [shard for row in rows for shard in row.shards]
    rings = [(shard.ring[0], len(shard.ring)) if shard.ring else (-1, 0) for shard in shards]
    firsts, widths = _ints(rings).reshape(-1, 2).T
    bounds = _ints([pair for shard in shards for pair in shard.ranges]).reshape(-1, 2)
    return PlanTable(
        counts=_ints([len(rank) for rank in ranks]),
        offloads=np.array([row.offload for row in rows], dtype=np.float64),
        shard_rows=np.repeat(np.arange(len(rows)), _ints([len(row.shards) for row in rows])),
        seqs=_ints([shard.seq for shard in shards]),
        ring_firsts=firsts,
        ring_widths=widths,
        odd_rings={
            number: shard.ring for number, shard in enumerate(shards) if shard.ring != tuple(range(*_span(shard.ring)))
        },
        num_ranges=_ints([len(shard.ranges) for shard in shards]),
        starts=bounds[:, 0],
        stops=bounds[:, 1],
    )


def _span(ring: tuple[int, ...]) -> tuple[int, int]:
    return (ring[0], ring[0] + len(ring)) if ring else (0, 0)


def _ints(values: Sequence[int] | Sequence[tuple[int, int]]) -> Ints:
    return np.array(values, dtype=np.int64)
