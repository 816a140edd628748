"""A plan as three numbers for each sequence. The micro-batches of a rank are made from them on demand.

A step of a large cluster has a million shards; a rank needs only a few of them. Planners place a sequence by its first
rank, its width (contiguous ranks) and its order. Sequences of equal order on one rank are one micro-batch, and a rank
runs its micro-batches by ascending order. All ranks share this order, so rings cannot wait for each other in a circle.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import overload

import numpy as np
import numpy.typing as npt

from bytescale_ext.plan.step.micro_batch import MicroBatch, uneven_ranges, zigzag_bounds
from bytescale_ext.plan.step.plan import StepPlan
from bytescale_ext.plan.step.table import PlanTable, ragged_indices

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class PlacedRanks(Sequence[tuple[MicroBatch, ...]]):
    """``StepPlan.ranks`` of sequences on contiguous ranks.

    Attributes:
        num_ranks: HDP ranks.
        lengths: tokens of each sequence: [n].
        first_ranks, widths: first rank and number of ranks of each sequence's ring: [n].
        orders: running order of each sequence's micro-batch, from 0 on: [n].
        aligned: whether micro-batch ``i`` of a rank has order ``i``, and is empty if the rank has no sequence of this
            order; if not, a rank skips the orders that it does not use.
        offloads: share of the activations of each sequence that goes to host memory, [n] in 0 to 1; None: nothing.
        inner_rings: number of inner rings of each sequence's ring, [n]; None: all rings are plain.
        shares: tokens of each member of the ring of each sequence whose ring is uneven.
    """

    num_ranks: int
    lengths: Ints
    first_ranks: Ints
    widths: Ints
    orders: Ints
    aligned: bool = False
    offloads: Floats | None = None
    inner_rings: Ints | None = None
    shares: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    @cached_property
    def shards(self) -> tuple[Ints, Ints, Ints]:
        """Rank, micro-batch and sequence of every shard: [num_shards] each.

        Shards are sorted by rank, then micro-batch, then rings before local sequences, then sequence.
        """
        seqs, members = ragged_indices(self.widths)
        ranks, orders = self.first_ranks[seqs] + members, self.orders[seqs]
        by_row = _sorting_order(ranks, orders, self.widths[seqs] == 1, seqs)
        ranks, orders, seqs = ranks[by_row], orders[by_row], seqs[by_row]
        if self.aligned or not len(seqs):
            return ranks, orders, seqs
        is_new_rank = np.append(True, ranks[1:] != ranks[:-1])
        is_new = is_new_rank | np.append(True, orders[1:] != orders[:-1])
        number = np.cumsum(is_new) - 1
        first_of_rank = np.maximum.accumulate(np.where(is_new_rank, number, 0))
        return ranks, number - first_of_rank, seqs

    @cached_property
    def counts(self) -> Ints:
        """Micro-batches of each rank: [num_ranks]."""
        counts = np.zeros(self.num_ranks, dtype=np.int64)
        ranks, indices, _ = self.shards
        np.maximum.at(counts, ranks, indices + 1)
        return counts

    @cached_property
    def table(self) -> PlanTable:
        """All micro-batches as columns. The check and ``self[rank]`` both read this table."""
        ranks, indices, seqs = self.shards
        rows = (np.cumsum(self.counts) - self.counts)[ranks] + indices
        offloads = np.zeros(int(self.counts.sum()))
        if self.offloads is not None:
            np.maximum.at(offloads, rows, self.offloads[seqs])
        firsts, widths = self.first_ranks[seqs], self.widths[seqs]
        bounds = zigzag_bounds(self.lengths[seqs], widths, ranks - firsts)
        uneven = {
            shard: self.shares[int(seqs[shard])] for shard in np.flatnonzero(np.isin(seqs, list(self.shares))).tolist()
        }
        for shard, shares in uneven.items():
            bounds[shard] = 0
            for part, pair in enumerate(uneven_ranges(shares, int(ranks[shard] - firsts[shard]))):
                bounds[shard, part] = pair
        has_tokens = bounds[..., 1] > bounds[..., 0]
        return PlanTable(
            counts=self.counts,
            offloads=offloads,
            shard_rows=rows,
            seqs=seqs,
            ring_firsts=firsts,
            ring_widths=widths,
            odd_rings={},
            inner_rings=np.ones_like(seqs) if self.inner_rings is None else self.inner_rings[seqs],
            num_ranges=has_tokens.sum(axis=1),
            starts=bounds[has_tokens][:, 0],
            stops=bounds[has_tokens][:, 1],
            shares=uneven,
        )

    def held(self, rank: int) -> tuple[MicroBatch, ...] | None:
        """Return the micro-batches of a rank if they are known without the table, else None."""
        return self._latest.get(rank)

    def __getstate__(self) -> dict[str, object]:
        """Return the arrays, the counts and the latest rank, but no table: it is made again from the arrays."""
        return {name: value for name, value in self.__dict__.items() if name not in ("shards", "table")}

    @cached_property
    def _latest(self) -> dict[int, tuple[MicroBatch, ...]]:
        """The micro-batches of the latest rank: a training process reads a single rank, several times."""
        return {}

    def __len__(self) -> int:
        return self.num_ranks

    @overload
    def __getitem__(self, rank: int) -> tuple[MicroBatch, ...]: ...
    @overload
    def __getitem__(self, rank: slice) -> tuple[tuple[MicroBatch, ...], ...]: ...
    def __getitem__(self, rank: int | slice) -> tuple[MicroBatch, ...] | tuple[tuple[MicroBatch, ...], ...]:
        if isinstance(rank, slice):
            return tuple(self[index] for index in range(*rank.indices(self.num_ranks)))
        if not -self.num_ranks <= rank < self.num_ranks:
            raise IndexError(f"rank {rank} of {self.num_ranks}")
        rank %= self.num_ranks
        micro_batches = self._latest.get(rank)
        if micro_batches is None:
            micro_batches = self.table.micro_batches(rank)
            self._latest.clear()
            self._latest[rank] = micro_batches
        return micro_batches

    def __iter__(self) -> Iterator[tuple[MicroBatch, ...]]:
        return (self[rank] for rank in range(self.num_ranks))

    def __eq__(self, other: object) -> bool:
        """Compare the micro-batches with the micro-batches of any other sequence."""
        if not isinstance(other, Sequence) or len(other) != len(self):
            return NotImplemented if not isinstance(other, Sequence) else False
        return all(mine == tuple(theirs) for mine, theirs in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]


def micro_batch_counts(plan: StepPlan, expert_parallel: int = 1, multiple: int = 1) -> tuple[int, ...]:
    """Return the number of micro-batches that each HDP rank runs, including padding without weight in the loss.

    Each rank runs at least 1, so that it joins the collectives of the step. Groups of ``expert_parallel`` contiguous
    ranks, whose layers exchange tokens, run equally many. The number is a multiple of ``multiple``, the group size of
    virtual stages.
    """
    ranks = plan.ranks
    counts = ranks.counts if isinstance(ranks, PlacedRanks) else np.array([len(rank) for rank in ranks], dtype=np.int64)
    assert len(counts) % expert_parallel == 0, f"{len(counts)=} {expert_parallel=}"
    group_counts = np.maximum(counts, 1).reshape(-1, expert_parallel).max(axis=1)
    padded = -(-group_counts // multiple) * multiple
    return tuple(np.repeat(padded, expert_parallel).tolist())


def _sorting_order(*keys: Ints | Bools) -> Ints:
    """Return the indices that sort by the first key, then the second, and so on: [n], as each key.

    No key is negative.
    """
    sizes = [int(key.max(initial=0)) + 1 for key in keys]
    if math.prod(sizes) >= 2**62:
        return np.lexsort(keys[::-1])
    joined = np.zeros(len(keys[0]), dtype=np.int64)
    for key, size in zip(keys, sizes, strict=True):
        joined = joined * size + key
    return np.argsort(joined, kind="stable")
