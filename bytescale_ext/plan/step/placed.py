"""A plan as three numbers for each sequence. The micro-batches of a rank are made from them on demand.

A step of a large cluster has a million shards; a rank needs only a few of them. Planners place a sequence by its first
rank, its width (contiguous ranks) and its order: sequences of equal order on one rank are one micro-batch, and a rank
runs its micro-batches by ascending order. As all ranks share that order, rings cannot wait for each other in a circle.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import overload

import numpy as np
import numpy.typing as npt

from bytescale_ext.plan.step.micro_batch import MicroBatch, zigzag_bounds
from bytescale_ext.plan.step.plan import StepPlan
from bytescale_ext.plan.step.table import PlanTable, ragged_indices

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class PlacedRanks(Sequence[tuple[MicroBatch, ...]]):
    """``StepPlan.ranks`` of sequences that were placed on runs of contiguous ranks.

    Attributes:
        num_ranks: HDP ranks.
        lengths: tokens of each sequence: [n].
        first_ranks, widths: the ring of each sequence is ``first_rank .. first_rank + width - 1``: [n].
        orders: running order of the micro-batch of each sequence, from 0 on: [n].
        aligned: micro-batch ``i`` of a rank has order ``i``; it is empty if no sequence has that order there. Otherwise
            orders that a rank does not use are left out.
        offloads: share of the activations of each sequence that goes to host memory, [n] in 0 to 1; None: nothing.
        inner_rings: of how many inner rings the ring of each sequence consists, [n]; None: all rings are plain.
    """

    num_ranks: int
    lengths: Ints
    first_ranks: Ints
    widths: Ints
    orders: Ints
    aligned: bool = False
    offloads: Floats | None = None
    inner_rings: Ints | None = None

    @cached_property
    def shards(self) -> tuple[Ints, Ints, Ints]:
        """Rank, micro-batch and seq of every shard, [num_shards] each; by rank, micro-batch, rings first, seq."""
        seqs, members = ragged_indices(self.widths)
        ranks, orders = self.first_ranks[seqs] + members, self.orders[seqs]
        in_order = _sorted_by(ranks, orders, self.widths[seqs] == 1, seqs)
        ranks, orders, seqs = ranks[in_order], orders[in_order], seqs[in_order]
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
        """All micro-batches as columns: the source of both the check and ``self[rank]``."""
        ranks, indices, seqs = self.shards
        rows = (np.cumsum(self.counts) - self.counts)[ranks] + indices
        offloads = np.zeros(int(self.counts.sum()))
        if self.offloads is not None:
            np.maximum.at(offloads, rows, self.offloads[seqs])
        firsts, widths = self.first_ranks[seqs], self.widths[seqs]
        bounds = zigzag_bounds(self.lengths[seqs], widths, ranks - firsts)
        is_there = bounds[..., 1] > bounds[..., 0]
        return PlanTable(
            counts=self.counts,
            offloads=offloads,
            shard_rows=rows,
            seqs=seqs,
            ring_firsts=firsts,
            ring_widths=widths,
            odd_rings={},
            inner_rings=np.ones_like(seqs) if self.inner_rings is None else self.inner_rings[seqs],
            num_ranges=is_there.sum(axis=1),
            starts=bounds[is_there][:, 0],
            stops=bounds[is_there][:, 1],
        )

    @cached_property
    def _latest(self) -> dict[int, tuple[MicroBatch, ...]]:
        """The rank that was read last: a training process reads one rank, several times."""
        return {}

    def __len__(self) -> int:
        return self.num_ranks

    @overload
    def __getitem__(self, rank: int) -> tuple[MicroBatch, ...]: ...
    @overload
    def __getitem__(self, rank: slice) -> tuple[tuple[MicroBatch, ...], ...]: ...
    def __getitem__(self, rank: int | slice) -> tuple[MicroBatch, ...] | tuple[tuple[MicroBatch, ...], ...]:
        if isinstance(rank, slice):
            return tuple(self[one] for one in range(*rank.indices(self.num_ranks)))
        if not -self.num_ranks <= rank < self.num_ranks:
            raise IndexError(f"rank {rank} of {self.num_ranks}")
        rank %= self.num_ranks
        found = self._latest.get(rank)
        if found is None:
            found = self.table.micro_batches(rank)
            self._latest.clear()
            self._latest[rank] = found
        return found

    def __iter__(self) -> Iterator[tuple[MicroBatch, ...]]:
        return (self[rank] for rank in range(self.num_ranks))

    def __eq__(self, other: object) -> bool:
        """Compare with any sequence of micro-batches, however it is stored."""
        if not isinstance(other, Sequence) or len(other) != len(self):
            return NotImplemented if not isinstance(other, Sequence) else False
        return all(mine == tuple(theirs) for mine, theirs in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]


def micro_batch_counts(plan: StepPlan, expert_parallel: int = 1, multiple: int = 1) -> tuple[int, ...]:
    """Return how many micro-batches each HDP rank runs: its own, then padding without weight in the loss.

    Each rank runs at least 1, so that it joins the collectives of the step. The number is equal in each group of
    ``expert_parallel`` contiguous ranks, whose layers exchange tokens, and a multiple of ``multiple``, the group of
    virtual stages.
    """
    ranks = plan.ranks
    counts = ranks.counts if isinstance(ranks, PlacedRanks) else np.array([len(rank) for rank in ranks], dtype=np.int64)
    assert len(counts) % expert_parallel == 0, f"{len(counts)=} {expert_parallel=}"
    most = np.repeat(np.maximum(counts, 1).reshape(-1, expert_parallel).max(axis=1), expert_parallel)
    return tuple((-(-most // multiple) * multiple).tolist())


def _sorted_by(*keys: Ints | Bools) -> Ints:
    """Return the order by the first key, then the second, and so on: [n], as each key. No key is negative."""
    sizes = [int(key.max(initial=0)) + 1 for key in keys]
    if math.prod(sizes) >= 2**62:
        return np.lexsort(keys[::-1])
    joined = np.zeros(len(keys[0]), dtype=np.int64)
    for key, size in zip(keys, sizes, strict=True):
        joined = joined * size + key
    return np.argsort(joined, kind="stable")
