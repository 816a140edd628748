"""Plans of dynamic context parallelism of Megatron's development branch, run by our rings: an arm of ``speed.py``.

Ranks that share a sequence share a pack of sequences. Attention, data and reduction are the same as in the other arms,
so only the plans differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bytescale_ext.plan.step.plan import StepPlan
from bytescale_ext.plan.step.sizes import Cluster
from scripts.bench.cluster.hybrid import place_groups


@dataclass(frozen=True)
class DynamicPlanner:
    """The planner of Megatron's dynamic context parallelism, with the interface of our planners.

    Attributes:
        cluster: ranks of a step.
        megatron: source tree of Megatron.
    """

    cluster: Cluster
    megatron: Path

    def __call__(self, lengths: Sequence[int], should_stop: Callable[[], bool] | None = None) -> StepPlan:
        """Return the plan of a step. Raises ValueError if Megatron's scheduler has none.

        The scheduler counts equal shares of a sequence. Shares are whole tokens, so a pack may exceed C by some tokens.
        """
        from megatron.bytescale.cli.shared.megatron_dynamic import dynamic_groups

        groups = dynamic_groups(lengths, self.cluster, self.megatron)
        ranks = place_groups(groups, lengths, are_packs=True)
        most = int(np.bincount(ranks.table.shard_rows, ranks.table.tokens).max())
        return StepPlan(self.cluster.num_ranks, max(self.cluster.tokens_per_rank, most), tuple(lengths), ranks)

    def fallback(self, lengths: Sequence[int]) -> StepPlan:
        """Return the same plan, the only one."""
        return self(lengths)
