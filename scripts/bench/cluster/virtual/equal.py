"""Plans of data-parallel ranks with equally many documents each: an arm of ``rollouts.py``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from bytescale_ext.plan.cost.cost_model import StageCost
from bytescale_ext.plan.hdp.packing import pack_best_fit
from bytescale_ext.plan.library.balancers import get_seqlen_balanced_partitions
from bytescale_ext.plan.step.placed import PlacedRanks
from bytescale_ext.plan.step.plan import StepPlan
from bytescale_ext.plan.step.sizes import Cluster


@dataclass(frozen=True)
class EqualPlanner:
    """A planner without rings. Ranks get equally many documents of about equal work, in packs of at most C tokens.

    Attributes:
        cluster: ranks of a step.
        cost: cost of the model, the measure of work.
    """

    cluster: Cluster
    cost: StageCost

    def __call__(self, lengths: Sequence[int], should_stop: Callable[[], bool] | None = None) -> StepPlan:
        """Return the plan of a step. Raises ValueError if the documents do not divide into equal counts."""
        sizes, ones = np.array(lengths, dtype=np.int64), np.ones(len(lengths), dtype=np.int64)
        work = self.cost.both.sequence_cost(sizes.astype(np.float64), ones.astype(np.float64))
        firsts, orders = np.zeros_like(sizes), np.zeros_like(sizes)
        parts = get_seqlen_balanced_partitions(work.tolist(), self.cluster.num_ranks, equal_size=True)
        for rank, part in enumerate(parts):
            firsts[part] = rank
            for order, pack in enumerate(pack_best_fit(lengths, part, self.cluster.tokens_per_rank)):
                orders[list(pack)] = order
        ranks = PlacedRanks(self.cluster.num_ranks, sizes, firsts, ones, orders)
        return StepPlan(self.cluster.num_ranks, self.cluster.tokens_per_rank, tuple(lengths), ranks)

    def fallback(self, lengths: Sequence[int]) -> StepPlan:
        """Return the same plan, the only one."""
        return self(lengths)
