"""A plan as columns of integers, for checks, digests and costs.

The columns are made from micro-batches, valid or not, or from a plan that is stored as arrays (``PlacedRanks``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from bytescale_ext.plan.step.micro_batch import MicroBatch, Shard

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


def ragged_indices(counts: Ints) -> tuple[Ints, Ints]:
    """Return the row and the column of each entry of a ragged array, row by row: [entries] each.

    ``counts``: entries of each row: [rows].
    """
    rows = np.repeat(np.arange(len(counts)), counts)
    return rows, np.arange(len(rows)) - (np.cumsum(counts) - counts)[rows]


@dataclass(frozen=True, eq=False)
class PlanTable:
    """Micro-batches (rows) in the order of ranks, their shards in memory order, and the ranges of the shards.

    Attributes:
        counts: micro-batches of each rank: [ranks].
        offloads: offload share of each micro-batch: [rows].
        shard_rows: row of each shard: [shards].
        seqs: sequence of each shard: [shards].
        ring_firsts, ring_widths: first rank and ranks of each shard's ring, -1 and 0 without a ring: [shards].
        odd_rings: ring of each shard whose ring is not a run of contiguous ascending ranks.
        inner_rings: number of inner rings of each shard's ring: [shards].
        num_ranges: token ranges of each shard: [shards].
        starts, stops: first token and end of each range: [ranges].
        shares: tokens of each member of the ring of each shard whose ring is uneven.
    """

    counts: Ints
    offloads: Floats
    shard_rows: Ints
    seqs: Ints
    ring_firsts: Ints
    ring_widths: Ints
    odd_rings: dict[int, tuple[int, ...]]
    inner_rings: Ints
    num_ranges: Ints
    starts: Ints
    stops: Ints
    shares: dict[int, tuple[int, ...]] = field(default_factory=dict)

    @cached_property
    def row_ranks(self) -> Ints:
        """Rank of each row: [rows]."""
        return np.repeat(np.arange(len(self.counts)), self.counts)

    @cached_property
    def row_indices(self) -> Ints:
        """Index of each row among the micro-batches of its rank: [rows]."""
        return ragged_indices(self.counts)[1]

    @cached_property
    def range_shards(self) -> Ints:
        """Shard of each range: [ranges]."""
        return np.repeat(np.arange(len(self.seqs)), self.num_ranges)

    @cached_property
    def first_ranges(self) -> Ints:
        """First range of each shard: [shards]."""
        return np.asarray(np.cumsum(self.num_ranges) - self.num_ranges)

    @cached_property
    def tokens(self) -> Ints:
        """Tokens of each shard: [shards]."""
        sums = np.append(0, np.cumsum(self.stops - self.starts))
        return np.asarray(sums[self.first_ranges + self.num_ranges] - sums[self.first_ranges])

    @cached_property
    def row_groups(self) -> Ints:
        """Coupled group of each row: [rows]."""
        in_ring = self.ring_widths > 1
        return coupled_groups(self.shard_rows[in_ring], self.seqs[in_ring], len(self.row_ranks))

    @cached_property
    def _first_rows(self) -> Ints:
        """First row of each rank, then the number of rows: [ranks + 1]."""
        return np.append(0, np.cumsum(self.counts))

    @cached_property
    def _rank_shards(self) -> Ints:
        """First shard of each rank, then the number of shards: [ranks + 1]."""
        return np.asarray(np.searchsorted(self.shard_rows, self._first_rows), dtype=np.int64)

    def micro_batches(self, rank: int) -> tuple[MicroBatch, ...]:
        """Return the micro-batches of a rank."""
        first_row = int(self._first_rows[rank])
        row_shards: list[list[Shard]] = [[] for _ in range(int(self.counts[rank]))]
        for shard in range(int(self._rank_shards[rank]), int(self._rank_shards[rank + 1])):
            begin = int(self.first_ranges[shard])
            ranges = slice(begin, begin + int(self.num_ranges[shard]))
            pairs = zip(self.starts[ranges].tolist(), self.stops[ranges].tolist(), strict=True)
            form = (self.ring(shard), int(self.inner_rings[shard]), self.shares.get(shard, ()))
            row_shards[int(self.shard_rows[shard]) - first_row].append(
                Shard(int(self.seqs[shard]), tuple(pairs), *form)
            )
        offloads = self.offloads[first_row : first_row + len(row_shards)].tolist()
        return tuple(MicroBatch(tuple(shards), offload) for shards, offload in zip(row_shards, offloads, strict=True))

    def rank_slice(self, rank: int) -> slice:
        """Return the slice of a rank's shards in the columns [shards]."""
        return slice(int(self._rank_shards[rank]), int(self._rank_shards[rank + 1]))

    def where(self, shard: int) -> tuple[int, int]:
        """Return (rank, micro-batch) of a shard."""
        row = int(self.shard_rows[shard])
        return int(self.row_ranks[row]), int(self.row_indices[row])

    def ring(self, shard: int) -> tuple[int, ...]:
        """Return the ring of a shard."""
        first, width = int(self.ring_firsts[shard]), int(self.ring_widths[shard])
        return self.odd_rings.get(shard, tuple(range(first, first + width)))

    def digest(self, num_ranks: int, tokens_per_rank: int, lengths: Sequence[int], settings: Sequence[int]) -> str:
        """Return the first 16 hex digits of the sha256 of all columns, as little-endian 64-bit numbers.

        ``settings``: further numbers of the plan, which describe how micro-batches run.
        """
        odd = [number for shard, ring in sorted(self.odd_rings.items()) for number in (shard, len(ring), *ring)]
        for shard in np.flatnonzero(self.inner_rings != 1).tolist():
            odd += [-1 - shard, int(self.inner_rings[shard])]
        for shard, shares in sorted(self.shares.items()):
            odd += [-1 - len(self.seqs) - shard, *shares]
        columns = (
            self.counts, self.shard_rows, self.seqs, self.ring_firsts, self.ring_widths, self.num_ranges, self.starts,
            self.stops, odd, lengths, (num_ranks, tokens_per_rank, *settings),
        )  # fmt: skip
        digest = hashlib.sha256()
        for column in columns:
            numbers = np.asarray(column, dtype="<i8")
            digest.update(np.array([len(numbers)], dtype="<i8").tobytes() + numbers.tobytes())
        digest.update(self.offloads.astype("<f8").tobytes())
        return digest.hexdigest()[:16]


def coupled_groups(rows: Ints, seqs: Ints, num_rows: int) -> Ints:
    """Return the coupled group of each micro-batch, numbered from 0 by first appearance: [num_rows].

    Micro-batches that share a ring, directly or through other micro-batches, are one group: they must run at the same
    time. The groups are found by label propagation: each ring gives the smallest label of its members to all members,
    until nothing changes.

    ``rows``, ``seqs``: micro-batch and sequence of each shard of a ring: [shards].
    """
    labels = np.arange(num_rows)
    by_seq = np.argsort(seqs, kind="stable")
    rows, seqs = rows[by_seq], seqs[by_seq]
    opens = np.flatnonzero(np.append(True, seqs[1:] != seqs[:-1])[: len(seqs)])
    sizes = np.diff(np.append(opens, len(seqs)))
    while len(opens):
        smallest = np.repeat(np.minimum.reduceat(labels[rows], opens), sizes)
        merged = labels.copy()
        np.minimum.at(merged, labels[rows], smallest)  # the label's own row too, so that long chains join quickly
        np.minimum.at(merged, rows, smallest)
        merged = merged[merged]
        if np.array_equal(merged, labels):
            break
        labels = merged
    return np.asarray(np.unique(labels, return_inverse=True)[1], dtype=np.int64)


@runtime_checkable
class HasTable(Protocol):
    """``StepPlan.ranks`` that are stored as a table."""

    @property
    def table(self) -> PlanTable: ...

    def held(self, rank: int) -> tuple[MicroBatch, ...] | None:
        """Return the micro-batches of a rank if they are known without the table, else None."""
        ...


@dataclass(frozen=True, eq=False, slots=True)
class RankShards:
    """The shards of one rank as columns.

    Attributes:
        num_micro_batches: micro-batches of the rank.
        num_filled: micro-batches with at least one shard.
        seqs: sequence of each shard: [shards].
        widths: ranks of each shard's ring: [shards].
        tokens: tokens of each shard: [shards].
        uneven: shards of uneven rings: [uneven shards].
    """

    num_micro_batches: int
    num_filled: int
    seqs: Ints
    widths: Ints
    tokens: Ints
    uneven: Ints


def shards_of_rank(ranks: Sequence[tuple[MicroBatch, ...]], rank: int) -> RankShards:
    """Return the shards of one rank of ``StepPlan.ranks``.

    If the ranks have a table, no micro-batches are made; if they hold the rank's micro-batches, no table is made.
    """
    held = ranks.held(rank) if isinstance(ranks, HasTable) else ranks[rank]
    if held is None:
        assert isinstance(ranks, HasTable), f"{ranks=}"
        table, index = ranks.table, rank
    else:
        table, index = table_of((held,)), 0
    shards = table.rank_slice(index)
    rows = table.shard_rows[shards]
    num_filled = int(np.count_nonzero(np.diff(rows))) + 1 if len(rows) else 0
    uneven = [shard - shards.start for shard in table.shares if shards.start <= shard < shards.stop]
    columns = (table.seqs[shards], table.ring_widths[shards], table.tokens[shards], _ints(uneven))
    return RankShards(int(table.counts[index]), num_filled, *columns)


def table_of(ranks: Sequence[tuple[MicroBatch, ...]]) -> PlanTable:
    """Return the table of ``StepPlan.ranks``."""
    if isinstance(ranks, HasTable):
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
        inner_rings=_ints([shard.inner_rings for shard in shards]),
        num_ranges=_ints([len(shard.ranges) for shard in shards]),
        starts=bounds[:, 0],
        stops=bounds[:, 1],
        shares={number: shard.shares for number, shard in enumerate(shards) if shard.shares},
    )


def _span(ring: tuple[int, ...]) -> tuple[int, int]:
    return (ring[0], ring[0] + len(ring)) if ring else (0, 0)


def _ints(values: Sequence[int] | Sequence[tuple[int, int]]) -> Ints:
    return np.array(values, dtype=np.int64)
