"""A step to lay out in aligned slots: the problem, longest sequences first, and the numbers that follow from it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from bytescale_ext.plan.cost.cost_model import CostModel
from bytescale_ext.plan.cost.slice_shares import SliceShares
from bytescale_ext.plan.hdp.aligned.clock import alone_seconds, launch_seconds, ring_seconds
from bytescale_ext.plan.hdp.problem import Problem
from bytescale_ext.plan.step.placed import PlacedRanks

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class AlignedStep:
    """The step to lay out; the problem's longest sequences come first."""

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
    def fill(self) -> float:
        """How many more times a slot counts because stages fill and drain."""
        return (self.num_stages - 1) / self.problem.slicing.num_slices

    @cached_property
    def launch(self) -> float:
        """Cost of a slot without any tokens."""
        return self.cost.g * self.problem.slicing.num_slices

    @cached_property
    def launches(self) -> Floats:
        """Cost of a slice without any tokens, forward and backward: [2]."""
        return launch_seconds(self.problem.stage)

    @cached_property
    def seconds(self) -> Floats:
        """Work of each sequence on one rank: [n]."""
        sizes = self.lengths.astype(np.float64)
        return np.asarray(self.cost.a * self.cost.squares(sizes) + self.cost.b * sizes)

    @cached_property
    def alone_seconds(self) -> Floats:
        """Seconds of each slice of each sequence on one rank, forward and backward, without launches: [2, n]."""
        return alone_seconds(self.lengths, self.problem.stage, self.problem.slicing)

    def ring_seconds(self, lengths: Ints, widths: Ints) -> Floats:
        """Return the seconds of the slices of rings on each of their ranks, without launches: [2, rings, k].

        Forward and backward. ``lengths``, ``widths``: tokens and ranks of each: [rings].
        """
        return ring_seconds(lengths, widths, self.problem.stage, self.problem.slicing)

    @cached_property
    def hidden_widths(self) -> Ints:
        """The most ranks of each sequence over which the exchange of each of its slices hides behind computing: [n]."""
        stage = self.problem.stage
        slow = [max(0.0, one.c - one.h - one.e) for one in (stage.forward, stage.backward)]
        if not any(slow):
            return np.full(len(self.lengths), self.num_ranks)
        sizes = self.lengths.astype(np.float64)
        cut = SliceShares.of(self.cost, sizes, np.full(len(sizes), 2.0), self.problem.slicing)
        exchange = slow[0] * cut.exchanged + slow[1] * cut.backward_exchanged(stage)
        most = self.lengths * self.cost.a * (cut.full_squares / exchange).min(axis=1) + 1
        return np.minimum(most, self.num_ranks).astype(np.int64)

    @property
    def least_size(self) -> int:
        """About how many array entries a layout touches whose micro-batches are full."""
        return self._size(-(-int(self.lengths.sum()) // (self.num_ranks * self.problem.tokens_per_rank)))

    def size(self, placed: PlacedRanks) -> int:
        """Return about how many array entries one layout of this step touches."""
        return self._size(int(placed.orders.max()) + 1)

    def _size(self, num_slots: int) -> int:
        actions = 2 * self.num_stages * self.problem.slicing.num_slices
        return (len(self.lengths) + self.num_ranks * actions) * (num_slots + 1)
