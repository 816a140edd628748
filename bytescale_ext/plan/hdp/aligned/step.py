"""A step to plan in aligned slots: the problem, longest sequences first, and quantities derived from it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from bytescale_ext.plan.cost.cost_model import CostModel
from bytescale_ext.plan.cost.slice_shares import SliceShares
from bytescale_ext.plan.hdp.aligned.clock import local_seconds, ring_seconds, slice_overheads
from bytescale_ext.plan.hdp.problem import Problem
from bytescale_ext.plan.step.placed import PlacedRanks

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class AlignedStep:
    """The step to plan.

    Attributes:
        problem: the problem, with its longest sequences first.
    """

    problem: Problem

    @property
    def lengths(self) -> Ints:
        """Tokens of each sequence: [n]."""
        return self.problem.lengths

    @property
    def num_ranks(self) -> int:
        return self.problem.num_ranks

    @property
    def num_stages(self) -> int:
        return len(self.problem.stages)

    @cached_property
    def cost(self) -> CostModel:
        return self.problem.cost

    @cached_property
    def ramp_slots(self) -> float:
        """Idle time of a stage while the pipeline fills and drains, counted in slots: (p - 1) / k."""
        return (self.num_stages - 1) / self.problem.slicing.num_slices

    @cached_property
    def slot_overhead(self) -> float:
        """Seconds of an empty slot."""
        return self.cost.g * self.problem.slicing.num_slices

    @cached_property
    def slice_overheads(self) -> Floats:
        """Seconds of an empty slice, forward and backward: [2]."""
        return slice_overheads(self.problem.stage)

    @cached_property
    def seconds(self) -> Floats:
        """Seconds of each sequence on one rank: [n]."""
        sizes = self.lengths.astype(np.float64)
        return np.asarray(self.cost.a * self.cost.squares(sizes) + self.cost.b * sizes)

    @cached_property
    def local_seconds(self) -> Floats:
        """Seconds of each slice of each sequence on one rank, forward and backward, without overheads: [2, n]."""
        return local_seconds(self.lengths, self.problem.stage, self.problem.slicing)

    def ring_seconds(self, lengths: Ints, widths: Ints) -> Floats:
        """Return the seconds of each slice of rings on each of their ranks, without overheads: [2, rings, k].

        The first axis is forward and backward. ``lengths``, ``widths``: tokens and ranks of each ring: [rings].
        """
        return ring_seconds(lengths, widths, self.problem.stage, self.problem.slicing)

    @cached_property
    def hidden_widths(self) -> Ints:
        """The most ranks over which the exchange of each sequence overlaps with computation, in every slice: [n]."""
        stage = self.problem.stage
        exposed = [max(0.0, cost.c - cost.h - cost.e) for cost in (stage.forward, stage.backward)]
        if not any(exposed):
            return np.full(len(self.lengths), self.num_ranks)
        sizes = self.lengths.astype(np.float64)
        shares = SliceShares.of(self.cost, sizes, np.full(len(sizes), 2.0), self.problem.slicing)
        exchange = exposed[0] * shares.exchanged + exposed[1] * shares.backward_exchanged(stage)
        widest = self.lengths * self.cost.a * (shares.full_squares / exchange).min(axis=1) + 1
        return np.minimum(widest, self.num_ranks).astype(np.int64)

    @property
    def min_array_entries(self) -> int:
        """Estimated array entries that building and timing a plan touches if all its micro-batches are full."""
        return self._array_entries(-(-int(self.lengths.sum()) // (self.num_ranks * self.problem.tokens_per_rank)))

    def array_entries(self, placed: PlacedRanks) -> int:
        """Return the estimated number of array entries that building and timing a plan of this step touches."""
        return self._array_entries(int(placed.orders.max()) + 1)

    def _array_entries(self, num_slots: int) -> int:
        actions = 2 * self.num_stages * self.problem.slicing.num_slices
        return (len(self.lengths) + self.num_ranks * actions) * (num_slots + 1)
