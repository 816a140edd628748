"""The shards of a plan as parallel arrays, from which costs, replays and figures are computed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from bytescale_ext.plan.cost.cost_model import CostModel
from bytescale_ext.plan.step.plan import StepPlan
from bytescale_ext.plan.step.table import coupled_groups, table_of

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
        """Return the shards of a plan's table."""
        table = table_of(plan.ranks)
        ranks = table.row_ranks[table.shard_rows]
        members = ranks - table.ring_firsts
        for shard, ring in table.odd_rings.items():
            members[shard] = ring.index(int(ranks[shard]))
        lengths = np.array(plan.lengths, dtype=np.int64)[table.seqs]
        return cls(table.counts, table.shard_rows, table.seqs, members, table.ring_widths, lengths, table.tokens)

    def with_counts(self, counts: Ints) -> ShardTable:
        """Return the table with empty micro-batches at the end of each rank, ``counts`` in all: [num_ranks]."""
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
        """Return ``CostModel.micro_batch_cost`` of each micro-batch: [num_rows]."""
        lengths, widths = self.lengths.astype(np.float64), self.widths.astype(np.float64)
        shards = cost.attention_cost(lengths, widths) + cost.b * self.tokens
        return np.asarray(cost.g + np.bincount(self.rows, weights=shards, minlength=self.num_rows))

    def row_exposed(self, cost: CostModel) -> Floats:
        """Return the part of ``row_costs`` that is ring exchange not hidden behind attention: [num_rows]."""
        lengths, widths = self.lengths.astype(np.float64), self.widths.astype(np.float64)
        beyond = np.maximum(0.0, cost.c * lengths * (widths - 1) - cost.a * lengths * lengths) / widths
        return np.bincount(self.rows, weights=beyond, minlength=self.num_rows)

    @cached_property
    def row_groups(self) -> Ints:
        """The coupled group of each micro-batch: [num_rows]."""
        in_ring = self.widths > 1
        return coupled_groups(self.rows[in_ring], self.seqs[in_ring], self.num_rows)

    def distinct_peers(self, folded: bool = True) -> Ints:
        """Return with how many ranks each rank exchanges keys and values: [num_ranks].

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
