"""Ranks whose gradient reductions may begin within their last micro-batch.

With ``--overlap-grad-reduce`` a rank posts the reduction of a bucket as soon as its last micro-batch has computed the
bucket's gradients, and ring exchanges of earlier layers follow. A reduction ends once all ranks have posted it. If a
ring partner has further micro-batches, the partner posts its reductions after these ring exchanges:

    rank 0 (last micro-batch)     reduction 1 | ring, layer 1 | reduction 2
    rank 1 (further work)         ring, layer 1 | ... | reduction 1 | reduction 2

Then anything that makes rank 0 wait for its device after reduction 1, such as the return of cached memory to CUDA,
makes both ranks wait forever. It is also outside NCCL's rules, which ask for one order of communicators on all ranks.
Such a rank begins its reductions after its last exchange. All other orders agree: exchanges of micro-batches that are
not the last of all their ranks come before all reductions, and ranks that share a ring or experts in their last
micro-batches post the same exchanges and reductions in the same order.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bytescale_ext.plan.step.placed import micro_batch_counts
from bytescale_ext.plan.step.plan import StepPlan
from bytescale_ext.plan.step.table import coupled_groups, table_of


def overlapping_ranks(plan: StepPlan, num_run: Sequence[int], expert_ranks: int = 1) -> npt.NDArray[np.bool_]:
    """Return whether reductions of each rank may overlap with its last backward pass: [ranks].

    Args:
        plan: checked plan of a step.
        num_run: micro-batches that each rank runs; padding after the plan's micro-batches has no rings.
        expert_ranks: contiguous ranks that share experts and exchange tokens in each micro-batch.
    """
    table = table_of(plan.ranks)
    is_last = np.asarray(num_run)[table.row_ranks] == table.row_indices + 1
    in_last_ring = is_last[table.shard_rows] & (table.ring_widths > 1)
    ranks, seqs = table.row_ranks[table.shard_rows[in_last_ring]], table.seqs[in_last_ring]
    members = np.bincount(seqs, minlength=1)
    is_last_of_all = members[seqs] == table.ring_widths[in_last_ring]
    # Ranks that share experts are joined like the members of a ring.
    all_ranks = np.arange(plan.num_ranks)
    groups = coupled_groups(
        np.concatenate((ranks, all_ranks)),
        np.concatenate((seqs, len(plan.lengths) + all_ranks // expert_ranks)),
        plan.num_ranks,
    )
    return ~np.isin(groups, groups[ranks[~is_last_of_all]])


@dataclass(frozen=True, slots=True)
class Overlaps:
    """Fact of a plan: whether the reductions of a rank may overlap with its last backward pass.

    Attributes:
        rank: HDP rank.
        expert_ranks: see ``overlapping_ranks``.
    """

    rank: int
    expert_ranks: int = 1

    @property
    def key(self) -> Hashable:
        """See ``Fact``."""
        return self

    def __call__(self, plan: StepPlan) -> bool:
        """Return whether they may."""
        counts = micro_batch_counts(plan, self.expert_ranks)
        return bool(overlapping_ranks(plan, counts, self.expert_ranks)[self.rank])
