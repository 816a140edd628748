"""A step to lay out in aligned slots: the problem, longest sequences first, and the numbers that follow from it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bytescale_ext.plan.cost.cost_model import CostModel
from bytescale_ext.plan.cost.slice_shares import SliceShares
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

    @property
    def cost(self) -> CostModel:
        return self.problem.cost

    @property
    def fill(self) -> float:
        """How many more times a slot counts because stages fill and drain."""
        return (self.num_stages - 1) / self.problem.slicing.num_slices

    @property
    def launch(self) -> float:
        """Cost of a slot without any tokens."""
        return self.cost.g * self.problem.slicing.num_slices

    @property
    def seconds(self) -> Floats:
        """Work of each sequence on one rank: [n]."""
        sizes = self.lengths.astype(np.float64)
        return np.asarray(self.cost.a * self.cost.squares(sizes) + self.cost.b * sizes)

    def ring_seconds(self, lengths: Floats, widths: Floats) -> Floats:
        """Return the seconds of all slices of each sequence on each rank of its ring, without launches.

        ``lengths``, ``widths`` and the result: [n].
        """
        (forward, _), (backward, _) = self._cut(lengths, widths).stage_costs(self.problem.stage)
        return np.asarray((forward + backward).sum(axis=1))

    @property
    def hidden_widths(self) -> Ints:
        """The most ranks of each sequence over which the exchange of each of its slices hides behind computing: [n]."""
        stage = self.problem.stage
        slow = [max(0.0, one.c - one.h - one.e) for one in (stage.forward, stage.backward)]
        if not any(slow):
            return np.full(len(self.lengths), self.num_ranks)
        cut = self._cut(self.lengths.astype(np.float64), np.full(len(self.lengths), 2.0))
        exchange = slow[0] * cut.exchanged + slow[1] * cut.backward_exchanged(stage)
        most = self.lengths * self.cost.a * (cut.full_squares / exchange).min(axis=1) + 1
        return np.minimum(most, self.num_ranks).astype(np.int64)

    def _cut(self, lengths: Floats, widths: Floats) -> SliceShares:
        return SliceShares.of(self.cost, lengths, widths, self.problem.slicing)

    def size(self, placed: PlacedRanks) -> int:
        """Return about how many array entries one layout of this step touches."""
        actions = 2 * self.num_stages * self.problem.slicing.num_slices
        return (len(self.lengths) + self.num_ranks * actions) * (int(placed.orders.max()) + 2)
