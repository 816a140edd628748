"""The shards of a plan as parallel arrays: what costs, replays and figures of large plans are computed from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from bytescale_ext.plan.cost import CostModel
from bytescale_ext.plan.placed import PlacedRanks
from bytescale_ext.plan.shapes import StepPlan

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class ShardTable:
    """Every shard of a plan; rows of one micro-batch, and micro-batches of one rank, need not be neighbours.

    Micro-batches are numbered rank by rank: micro-batch ``i`` of rank ``r`` is number ``offsets[r] + i``.

    Attributes:
        counts: micro-batches of each rank: [num_ranks].
        rows: the micro-batch of each shard, by number: [n].
        seqs: the sequence of each shard: [n].
        members: index of the shard's rank in its ring: [n].
        widths: ranks of its ring: [n].
        lengths: tokens of its whole sequence: [n].
        tokens: tokens of the shard itself: [n].
    """

    counts: Ints
    rows: Ints
    seqs: Ints
    members: Ints
    widths: Ints
    lengths: Ints
    tokens: Ints

    @classmethod
    def of(cls, plan: StepPlan) -> ShardTable:
        """The table of a plan; from arrays without making a micro-batch where the plan is kept as arrays."""
        return _of_placed(plan.ranks) if isinstance(plan.ranks, PlacedRanks) else _of_micro_batches(plan)

    def with_counts(self, counts: Ints) -> ShardTable:
        """The same with empty micro-batches at the end of each rank, ``counts`` in all: [num_ranks]."""
        assert (counts >= self.counts).all(), f"{counts=} {self.counts=}"
        ranks = self.row_ranks[self.rows]
        rows = self.rows + (np.cumsum(counts) - counts - self.offsets)[ranks]
        return replace(self, counts=counts, rows=rows)

    @property
    def num_ranks(self) -> int:
        return len(self.counts)

    @cached_property
    def offsets(self) -> Ints:
        """Number of the first micro-batch of each rank: [num_ranks]."""
        return np.asarray(np.cumsum(self.counts) - self.counts)

    @property
    def num_rows(self) -> int:
        """Micro-batches of all ranks together."""
        return int(self.counts.sum())

    @cached_property
    def row_ranks(self) -> Ints:
        """The rank of each micro-batch: [num_rows]."""
        return np.repeat(np.arange(self.num_ranks), self.counts)

    @cached_property
    def row_tokens(self) -> Ints:
        """Tokens of each micro-batch: [num_rows]."""
        return np.bincount(self.rows, weights=self.tokens, minlength=self.num_rows).astype(np.int64)

    def row_costs(self, cost: CostModel) -> Floats:
        """``CostModel.micro_batch_cost`` of each micro-batch: [num_rows]."""
        lengths, widths = self.lengths.astype(np.float64), self.widths.astype(np.float64)
        shards = cost.attention_costs(lengths, widths) + cost.b * self.tokens
        return np.asarray(cost.g + np.bincount(self.rows, weights=shards, minlength=self.num_rows))

    def row_exposed(self, cost: CostModel) -> Floats:
        """The part of ``row_costs`` that is ring exchange beyond what attention hides: [num_rows]."""
        lengths, widths = self.lengths.astype(np.float64), self.widths.astype(np.float64)
        beyond = np.maximum(0.0, cost.c * lengths * (widths - 1) - cost.a * lengths * lengths) / widths
        return np.bincount(self.rows, weights=beyond, minlength=self.num_rows)

    @cached_property
    def row_classes(self) -> Ints:
        """The class of each micro-batch, numbered from 0: those tied by rings, directly or through others: [num_rows].

        Each ring hands the smallest label of its members to all of them until nothing changes.
        """
        labels = np.arange(self.num_rows)
        in_ring = np.flatnonzero(self.widths > 1)
        in_ring = in_ring[np.argsort(self.seqs[in_ring], kind="stable")]
        rows, seqs = self.rows[in_ring], self.seqs[in_ring]
        opens = np.flatnonzero(np.append(True, seqs[1:] != seqs[:-1])[: len(seqs)])
        sizes = np.diff(np.append(opens, len(seqs)))
        while len(opens):
            smallest = np.minimum.reduceat(labels[rows], opens)
            merged = labels.copy()
            np.minimum.at(merged, labels[rows], np.repeat(smallest, sizes))  # on the root, so that chains join quickly
            np.minimum.at(merged, rows, np.repeat(smallest, sizes))
            merged = merged[merged]
            if np.array_equal(merged, labels):
                break
            labels = merged
        return np.asarray(np.unique(labels, return_inverse=True)[1], dtype=np.int64)

    def distinct_peers(self, folded: bool = True) -> Ints:
        """Ranks with which each rank exchanges keys and values: [num_ranks].

        A ring is passed in the order 0, 2, 4, ..., 5, 3, 1 of its members, which leaves every member within two
        ranks of its neighbours; with ``folded`` False in the order 0, 1, 2, ....
        """
        ring = self.widths > 1
        ranks, members, widths = self.row_ranks[self.rows[ring]], self.members[ring], self.widths[ring]
        if folded:
            after = np.where(members + 2 < widths, members + 2, np.where(members == widths - 1, widths - 2, widths - 1))
            before = np.where(members >= 2, members - 2, 1 - members)
        else:
            after, before = (members + 1) % widths, (members - 1) % widths
        pairs = [ranks * self.num_ranks + ranks - members + peer for peer in (after, before)]
        return np.bincount(np.unique(np.concatenate(pairs)) // self.num_ranks, minlength=self.num_ranks)


def _of_placed(placed: PlacedRanks) -> ShardTable:
    ranks, indices, seqs = placed.shards
    offsets = np.cumsum(placed.counts) - placed.counts
    lengths, widths = placed.lengths[seqs], placed.widths[seqs]
    members = ranks - placed.first_ranks[seqs]
    tokens = lengths // widths + (members < lengths % widths)
    return ShardTable(placed.counts, offsets[ranks] + indices, seqs, members, widths, lengths, tokens)


def _of_micro_batches(plan: StepPlan) -> ShardTable:
    counts = np.array([len(rank) for rank in plan.ranks], dtype=np.int64)
    columns: list[tuple[int, ...]] = []
    row = 0
    for rank, micro_batches in enumerate(plan.ranks):
        for micro_batch in micro_batches:
            for shard in micro_batch.shards:
                member = shard.ring.index(rank)
                length = plan.lengths[shard.seq]
                columns.append((row, shard.seq, member, len(shard.ring), length, shard.num_tokens))
            row += 1
    return ShardTable(counts, *np.array(columns, dtype=np.int64).reshape(-1, 6).T)
