"""A plan as three numbers for each sequence, and the micro-batches of a rank made from them when they are asked for.

A step of a large cluster has a million shards; a rank needs the few that are its own. All planners but the static
baseline say where a sequence goes by its first rank, its width (contiguous ranks) and its order: sequences of equal
order on one rank are one micro-batch, and a rank runs its micro-batches by ascending order. Because the order is one
for all ranks, rings cannot wait for each other in a circle.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from bytescale_ext.plan.shapes import MicroBatch, Shard, zigzag_ranges
from bytescale_ext.plan.table import PlanTable

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class PlacedRanks(Sequence[tuple[MicroBatch, ...]]):
    """``StepPlan.ranks`` of sequences that were placed on runs of contiguous ranks.

    Attributes:
        num_ranks: HDP ranks.
        lengths: tokens of each sequence: [n].
        first_ranks, widths: the ring of each sequence is ``first_rank .. first_rank + width - 1``: [n].
        orders: see the module; [n], from 0 on.
        aligned: micro-batch ``i`` of a rank is the one of order ``i``, an empty one where it has none before its
            last; otherwise orders that a rank does not use are left out.
        offloads: share of the activations of each sequence that goes to host memory, [n] in 0 to 1; None: nothing.
    """

    num_ranks: int
    lengths: Ints
    first_ranks: Ints
    widths: Ints
    orders: Ints
    aligned: bool = False
    offloads: Floats | None = None

    @cached_property
    def shards(self) -> tuple[Ints, Ints, Ints]:
        """(rank, micro-batch, seq) of every shard, in memory order: by rank, micro-batch, rings first, seq."""
        seqs = np.repeat(np.arange(len(self.widths)), self.widths)
        begins = np.cumsum(self.widths) - self.widths
        ranks = np.repeat(self.first_ranks - begins, self.widths) + np.arange(len(seqs))
        orders = self.orders[seqs]
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
    def _bounds(self) -> Ints:
        """Where the shards of each rank begin: [num_ranks + 1]."""
        return np.asarray(np.searchsorted(self.shards[0], np.arange(self.num_ranks + 1)), dtype=np.int64)

    @cached_property
    def table(self) -> PlanTable:
        """All micro-batches as columns, those of ``self[rank]`` without making them."""
        ranks, indices, seqs = self.shards
        rows = (np.cumsum(self.counts) - self.counts)[ranks] + indices
        offloads = np.zeros(int(self.counts.sum()))
        if self.offloads is not None:
            np.maximum.at(offloads, rows, self.offloads[seqs])
        firsts, widths = self.first_ranks[seqs], self.widths[seqs]
        bounds = _zigzag_bounds(self.lengths[seqs], widths, ranks - firsts)
        is_there = bounds[..., 1] > bounds[..., 0]
        return PlanTable(
            counts=self.counts,
            offloads=offloads,
            shard_rows=rows,
            seqs=seqs,
            ring_firsts=firsts,
            ring_widths=widths,
            odd_rings={},
            num_ranges=is_there.sum(axis=1),
            starts=bounds[is_there][:, 0],
            stops=bounds[is_there][:, 1],
        )

    def __len__(self) -> int:
        return self.num_ranks

    @overload
    def __getitem__(self, rank: int) -> tuple[MicroBatch, ...]: ...
    @overload
    def __getitem__(self, rank: slice) -> tuple[tuple[MicroBatch, ...], ...]: ...
    def __getitem__(self, rank: int | slice) -> Any:
        if isinstance(rank, slice):
            return tuple(self[one] for one in range(*rank.indices(self.num_ranks)))
        if not -self.num_ranks <= rank < self.num_ranks:
            raise IndexError(f"rank {rank} of {self.num_ranks}")
        rank %= self.num_ranks
        rows = slice(int(self._bounds[rank]), int(self._bounds[rank + 1]))
        held: list[list[Shard]] = [[] for _ in range(int(self.counts[rank]))]
        offloads = [0.0] * len(held)
        for index, seq in zip(self.shards[1][rows].tolist(), self.shards[2][rows].tolist(), strict=True):
            held[index].append(self._shard(seq, rank))
            if self.offloads is not None:
                offloads[index] = max(offloads[index], float(self.offloads[seq]))
        return tuple(MicroBatch(tuple(shards), offload) for shards, offload in zip(held, offloads, strict=True))

    def __iter__(self) -> Iterator[tuple[MicroBatch, ...]]:
        return (self[rank] for rank in range(self.num_ranks))

    def __eq__(self, other: object) -> bool:
        """Equal to any sequence of the same micro-batches, however it is kept."""
        if not isinstance(other, Sequence) or len(other) != len(self):
            return NotImplemented if not isinstance(other, Sequence) else False
        return all(mine == tuple(theirs) for mine, theirs in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def _shard(self, seq: int, rank: int) -> Shard:
        first, width = int(self.first_ranks[seq]), int(self.widths[seq])
        ranges = zigzag_ranges(int(self.lengths[seq]), width, rank - first)
        return Shard(seq, ranges, tuple(range(first, first + width)))


def _sorted_by(*keys: npt.NDArray[Any]) -> Ints:
    """Order by the first key, then the second, and so on; none is negative. One number for all where they fit."""
    sizes = [int(key.max(initial=0)) + 1 for key in keys]
    if math.prod(sizes) >= 2**62:
        return np.lexsort(keys[::-1])
    joined = np.zeros(len(keys[0]), dtype=np.int64)
    for key, size in zip(keys, sizes, strict=True):
        joined = joined * size + key
    return np.argsort(joined, kind="stable")


def _zigzag_bounds(lengths: Ints, widths: Ints, members: Ints) -> Ints:
    """``zigzag_ranges`` of many shards, empty ranges too: [n, 2 ranges, (start, stop)]."""
    base, extra = np.divmod(lengths, widths)

    def before(position: Ints, odd: int) -> Ints:
        larger = np.minimum(position, extra)
        return np.asarray(larger * ((base + 1 + odd) // 2) + (position - larger) * ((base + odd) // 2))

    front = np.stack((before(members, 1), before(members + 1, 1)), axis=1)
    back = np.stack((lengths - before(members + 1, 0), lengths - before(members, 0)), axis=1)
    local = (widths == 1)[:, None]
    front = np.where(local, np.stack((np.zeros_like(lengths), lengths), axis=1), front)
    return np.stack((front, np.where(local, 0, back)), axis=1)
