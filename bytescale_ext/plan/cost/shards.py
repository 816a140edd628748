"""The shards of a plan as parallel arrays, for costs, replays and statistics."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from bytescale_ext.plan.cost.cost_model import CostModel
from bytescale_ext.plan.step.placed import PlacedRanks
from bytescale_ext.plan.step.plan import StepPlan
from bytescale_ext.plan.step.table import coupled_groups, table_of

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class ShardTable:
    """All n shards of a plan, in any order.

    Micro-batches are numbered rank by rank: micro-batch ``i`` of rank ``r`` is number ``offsets[r] + i``.

    Attributes:
        counts: micro-batches of each rank: [num_ranks].
        rows: number of each shard's micro-batch: [n].
        seqs: sequence of each shard: [n].
        members: index of each shard's rank in its ring: [n].
        widths: ranks of each shard's ring: [n].
        lengths: tokens of each shard's whole sequence: [n].
        tokens: tokens of each shard: [n].
        inner_rings: number of inner rings of each shard's ring, [n]; None: all rings are plain.
        first_ranks: first rank of each shard's ring, [n]; None: rings are contiguous, so it is the shard's rank minus
            its member.
        speeds: speed of each rank, [num_ranks], or of each virtual stage of its pipeline, [num_ranks, V]; None: all
            are 1.
        ratios: tokens of each shard over an even share of its sequence, [n]; None: all shares are even.
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
    speeds: Floats | None = None
    ratios: Floats | None = None

    @classmethod
    def of(cls, plan: StepPlan) -> ShardTable:
        """Return the shards of a plan's table."""
        table = table_of(plan.ranks)
        ranks = table.row_ranks[table.shard_rows]
        members = ranks - table.ring_firsts
        for shard, ring in table.odd_rings.items():
            members[shard] = ring.index(int(ranks[shard]))
        lengths = plan.ranks.lengths if isinstance(plan.ranks, PlacedRanks) else np.array(plan.lengths, dtype=np.int64)
        rings = (table.seqs, members, table.ring_widths)
        columns = (table.counts, table.shard_rows, *rings, lengths[table.seqs], table.tokens, table.inner_rings)
        if not table.shares:
            return cls(*columns)
        ratios, uneven = np.ones(len(members)), list(table.shares)
        ratios[uneven] = (table.tokens * table.ring_widths)[uneven] / lengths[table.seqs[uneven]]
        return cls(*columns, ratios=ratios)

    def at(self, speeds: Floats | None) -> ShardTable:
        """Return the same shards on ranks of these speeds: [num_ranks] or [num_ranks, V]; None: all are 1."""
        return self if speeds is None else replace(self, speeds=speeds)

    def only_coupled_with(self, rank: int) -> ShardTable:
        """Return the micro-batches of a rank and of other ranks that run at the same time because of shared rings.

        The other micro-batches are left out. Those that stay keep their order, and are numbered anew.
        """
        in_ring = self.widths > 1
        rows, seqs = self.rows[in_ring], self.seqs[in_ring]
        is_chosen, num_before = self.row_ranks == rank, -1
        while num_before < (num_chosen := int(np.count_nonzero(is_chosen))):
            is_shared = np.zeros(int(seqs.max(initial=-1)) + 1, dtype=np.bool_)
            is_shared[seqs[is_chosen[rows]]] = True
            is_chosen[rows[is_shared[seqs]]] = True
            num_before = num_chosen
        shards = np.flatnonzero(is_chosen[self.rows])
        inner, firsts = (None if column is None else column[shards] for column in (self.inner_rings, self.first_ranks))
        return replace(
            self,
            counts=np.bincount(self.row_ranks[is_chosen], minlength=self.num_ranks),
            rows=(np.cumsum(is_chosen) - 1)[self.rows[shards]],
            seqs=self.seqs[shards],
            members=self.members[shards],
            widths=self.widths[shards],
            lengths=self.lengths[shards],
            tokens=self.tokens[shards],
            inner_rings=inner,
            first_ranks=firsts,
            ratios=None if self.ratios is None else self.ratios[shards],
        )

    def with_counts(self, counts: Ints) -> ShardTable:
        """Return the table with empty micro-batches after the micro-batches of each rank.

        ``counts``: micro-batches of each rank, with the empty ones: [num_ranks].
        """
        assert (counts >= self.counts).all(), f"{counts=} {self.counts=}"
        ranks = self.row_ranks[self.rows]
        rows = self.rows + (np.cumsum(counts) - counts - self.offsets)[ranks]
        return replace(self, counts=counts, rows=rows)

    @property
    def num_ranks(self) -> int:
        return len(self.counts)

    @cached_property
    def offsets(self) -> Ints:
        """Number of each rank's first micro-batch: [num_ranks]."""
        return np.asarray(np.cumsum(self.counts) - self.counts)

    @property
    def num_rows(self) -> int:
        """Number of micro-batches of all ranks together."""
        return int(self.counts.sum())

    @cached_property
    def row_ranks(self) -> Ints:
        """Rank of each micro-batch: [num_rows]."""
        return np.repeat(np.arange(self.num_ranks), self.counts)

    @cached_property
    def row_tokens(self) -> Ints:
        """Tokens of each micro-batch: [num_rows]."""
        return np.bincount(self.rows, weights=self.tokens, minlength=self.num_rows).astype(np.int64)

    def row_costs(self, cost: CostModel) -> Floats:
        """Return ``CostModel.micro_batch_cost`` of each micro-batch: [num_rows]."""
        lengths, widths = self.lengths.astype(np.float64), self.widths.astype(np.float64)
        shards = self.of_shares(cost.attention_cost(lengths, widths, self.hops(cost))) + cost.b * self.tokens
        return np.asarray(cost.g + np.bincount(self.rows, weights=shards, minlength=self.num_rows))

    def row_exposed(self, cost: CostModel) -> Floats:
        """Return the part of ``row_costs`` that is ring exchange without overlap: [num_rows]."""
        lengths, widths = self.lengths.astype(np.float64), self.widths.astype(np.float64)
        exposed = self.of_shares(cost.exposed_exchange(lengths, widths, self.hops(cost)))
        return np.bincount(self.rows, weights=exposed, minlength=self.num_rows)

    def of_shares(self, seconds: Floats) -> Floats:
        """Return the time of each shard, given the time of even shares: [n], or [n, ...], as ``seconds``."""
        if self.ratios is None:
            return seconds
        return np.asarray(seconds * self.ratios.reshape(-1, *(1 for _ in seconds.shape[1:])))

    def hops(self, cost: CostModel) -> Floats:
        """Return the time of the exchange of each shard's ring, in hops (``Nodes.hops``): [n]."""
        if cost.nodes is None:
            return np.asarray(self.widths - 1, dtype=np.float64)
        firsts = self.row_ranks[self.rows] - self.members if self.first_ranks is None else self.first_ranks
        return cost.nodes.hops(firsts, self.widths, self.widths // self._inner_widths)

    @cached_property
    def row_groups(self) -> Ints:
        """Coupled group of each micro-batch: [num_rows]."""
        in_ring = self.widths > 1
        return coupled_groups(self.rows[in_ring], self.seqs[in_ring], self.num_rows)

    def distinct_peers(self, folded: bool = True) -> Ints:
        """Return the number of ranks with which each rank exchanges keys and values: [num_ranks].

        Keys travel round a ring in the order 0, 2, 4, ..., 5, 3, 1 of its members, which keeps neighbours within two
        ranks, or, if not ``folded``, in the order 0, 1, 2, .... The same holds for inner rings and for the counterparts
        of different inner rings.
        """
        is_ring = self.widths > 1
        ranks, members = self.row_ranks[self.rows[is_ring]], self.members[is_ring]
        inner_widths = self._inner_widths[is_ring]
        num_inner = self.widths[is_ring] // inner_widths
        places, numbers = members % inner_widths, members // inner_widths
        peers = [ranks + place - places for place in _ring_neighbours(places, inner_widths, folded)]
        for number in _ring_neighbours(numbers, num_inner, folded):
            counterparts = ranks + (number - numbers) * inner_widths
            peers.append(np.where(num_inner > 1, counterparts, peers[0]))
        pairs = np.concatenate([ranks * self.num_ranks + ranks_of_peers for ranks_of_peers in peers])
        return np.bincount(np.unique(pairs) // self.num_ranks, minlength=self.num_ranks)

    def sent_to_other_nodes(self, ranks_per_node: int) -> Floats:
        """Return the share of each shard's sent keys that its rank sends to another node, 0 to 1: [n].

        Each member of a ring of D ranks sends D - 1 shares of keys. In a plain ring, all go to the next member. In a
        hierarchical ring, one share in each round except the last goes to the counterpart in the next inner ring.
        """
        ranks, inner_widths = self.row_ranks[self.rows], self._inner_widths
        is_nested = inner_widths < self.widths
        distance = np.where(is_nested, inner_widths, 1)
        size = np.where(is_nested, self.widths // inner_widths, self.widths)
        places = self.members // distance
        peers = ranks + (_ring_neighbours(places, size, folded=True)[0] - places) * distance
        leaves_node = (self.widths > 1) & (peers // ranks_per_node != ranks // ranks_per_node)
        return np.where(leaves_node, (size - 1) / np.maximum(self.widths - 1, 1), 0.0)

    @property
    def _inner_widths(self) -> Ints:
        """Ranks of an inner ring of each shard's ring: [n]."""
        return self.widths if self.inner_rings is None else self.widths // self.inner_rings


def _ring_neighbours(places: Ints, widths: Ints, folded: bool) -> tuple[Ints, Ints]:
    """Return the next and the previous place in rings of ``widths`` places: [n] each, as the arguments."""
    if not folded:
        return (places + 1) % widths, (places - 1) % widths
    turn, goes_up = np.where(places == widths - 1, widths - 2, widths - 1), places % 2 == 0
    up, down = np.where(places + 2 < widths, places + 2, turn), np.where(places >= 2, places - 2, 1 - places)
    return np.where(goes_up, up, down), np.where(goes_up, down, up)


@dataclass(frozen=True, slots=True)
class CoupledShards:
    """Fact of a plan: the shards of ``ShardTable.only_coupled_with`` a rank.

    Attributes:
        rank: HDP rank.
    """

    rank: int

    @property
    def key(self) -> Hashable:
        """See ``Fact``."""
        return self

    def __call__(self, plan: StepPlan) -> ShardTable:
        """Return the shards."""
        return ShardTable.of(plan).only_coupled_with(self.rank)
