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
        inner_rings: of how many inner rings its ring consists, [n]; None: all rings are plain.
        first_ranks: the first rank of its ring, [n]; None: as the rank of the shard and ``members`` say.
    """

    counts: Ints
    rows: Ints
    seqs: Ints
    members: Ints
    widths: Ints
    lengths: Ints
    tokens: Ints
    inner_rings: Ints | None = None
    first_ranks: Ints | None = None

    @classmethod
    def of(cls, plan: StepPlan) -> ShardTable:
        """Return the shards of a plan's table."""
        table = table_of(plan.ranks)
        ranks = table.row_ranks[table.shard_rows]
        members = ranks - table.ring_firsts
        for shard, ring in table.odd_rings.items():
            members[shard] = ring.index(int(ranks[shard]))
        lengths = np.array(plan.lengths, dtype=np.int64)[table.seqs]
        rings = (table.seqs, members, table.ring_widths)
        return cls(table.counts, table.shard_rows, *rings, lengths, table.tokens, table.inner_rings)

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
        shards = cost.attention_cost(lengths, widths, self.hops(cost)) + cost.b * self.tokens
        return np.asarray(cost.g + np.bincount(self.rows, weights=shards, minlength=self.num_rows))

    def row_exposed(self, cost: CostModel) -> Floats:
        """Return the part of ``row_costs`` that is ring exchange not hidden behind computing: [num_rows]."""
        lengths, widths = self.lengths.astype(np.float64), self.widths.astype(np.float64)
        beyond = cost.exposed_exchange(lengths, widths, self.hops(cost))
        return np.bincount(self.rows, weights=beyond, minlength=self.num_rows)

    def hops(self, cost: CostModel) -> Floats:
        """Return the time of the exchange of each ring, in hops (``Nodes.hops``): [n]."""
        if cost.nodes is None:
            return np.asarray(self.widths - 1, dtype=np.float64)
        firsts = self.row_ranks[self.rows] - self.members if self.first_ranks is None else self.first_ranks
        return cost.nodes.hops(firsts, self.widths, self.widths // self._inner_widths)

    @cached_property
    def row_groups(self) -> Ints:
        """The coupled group of each micro-batch: [num_rows]."""
        in_ring = self.widths > 1
        return coupled_groups(self.rows[in_ring], self.seqs[in_ring], self.num_rows)

    def distinct_peers(self, folded: bool = True) -> Ints:
        """Return with how many ranks each rank exchanges keys and values: [num_ranks].

        A ring is passed in the order 0, 2, 4, ..., 5, 3, 1 of its members, which leaves every member within two
        ranks of its neighbours; with ``folded`` False in the order 0, 1, 2, .... So are inner rings, and the
        counterparts in them.
        """
        ring = self.widths > 1
        ranks, members, inner = self.row_ranks[self.rows[ring]], self.members[ring], self._inner_widths[ring]
        counts = self.widths[ring] // inner
        places, groups = members % inner, members // inner
        found = [ranks + peers - places for peers in _neighbours(places, inner, folded)]
        nested = counts > 1
        for peers in _neighbours(groups, counts, folded):
            found.append(np.where(nested, ranks + (peers - groups) * inner, found[0]))
        pairs = np.concatenate([ranks * self.num_ranks + peers for peers in found])
        return np.bincount(np.unique(pairs) // self.num_ranks, minlength=self.num_ranks)

    def sent_to_other_nodes(self, ranks_per_node: int) -> Floats:
        """Return the share of the keys sent for each shard that its rank sends to another node: [n], 0 to 1.

        Each member sends D - 1 shares of keys: in a plain ring all to the next member, in a hierarchical ring one in
        each round but the last to its counterpart.
        """
        ranks, inner = self.row_ranks[self.rows], self._inner_widths
        nested = inner < self.widths
        distance, size = np.where(nested, inner, 1), np.where(nested, self.widths // inner, self.widths)
        places = self.members // distance
        peers = ranks + (_neighbours(places, size, folded=True)[0] - places) * distance
        goes = (self.widths > 1) & (peers // ranks_per_node != ranks // ranks_per_node)
        return np.where(goes, (size - 1) / np.maximum(self.widths - 1, 1), 0.0)

    @property
    def _inner_widths(self) -> Ints:
        """Ranks of an inner ring of each ring: [n]."""
        return self.widths if self.inner_rings is None else self.widths // self.inner_rings


def _neighbours(places: Ints, widths: Ints, folded: bool) -> tuple[Ints, Ints]:
    """Return the next and the previous place in rings of ``widths`` places: [n] each, as the arguments."""
    if not folded:
        return (places + 1) % widths, (places - 1) % widths
    turn, goes_up = np.where(places == widths - 1, widths - 2, widths - 1), places % 2 == 0
    up, down = np.where(places + 2 < widths, places + 2, turn), np.where(places >= 2, places - 2, 1 - places)
    return np.where(goes_up, up, down), np.where(goes_up, down, up)
