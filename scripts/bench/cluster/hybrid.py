"""Train with the plan of Megatron's own hybrid context parallelism, run by our rings: an arm of ``speed.py``.

Megatron's installed scheduler makes groups of sub-samples. The groups, their order, one sub-sample per forward pass and
the barrier between groups are Megatron's. Attention, data and reduction are the same as in the other arms, so only the
plans differ. It takes the flags of pretrain_gpt_hdp.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # so that it also runs as a file

from bytescale_ext.plan.step.placed import PlacedRanks
from bytescale_ext.plan.step.plan import StepPlan
from bytescale_ext.plan.step.sizes import Cluster

if TYPE_CHECKING:
    from bytescale_ext.data.loading.planning import Planner
    from megatron.bytescale.runtime import Runtime
    from megatron.bytescale.training.pretrain_arguments import Training

Ints = npt.NDArray[np.int64]

_GROUP = 1 << 20  # orders of one group begin at a multiple of this


@dataclass(frozen=True)
class HybridPlanner:
    """The planner of Megatron's hybrid context parallelism, with the interface of our planners."""

    cluster: Cluster

    def __call__(self, lengths: Sequence[int], should_stop: Callable[[], bool] | None = None) -> StepPlan:
        """Return the plan of a step. Raises ValueError if Megatron's scheduler fails."""
        from megatron.bytescale.cli.shared.megatron_hybrid import hybrid_groups

        groups = hybrid_groups(lengths, self.cluster)
        num_ranks, tokens_per_rank = self.cluster.num_ranks, self.cluster.tokens_per_rank
        return StepPlan(num_ranks, tokens_per_rank, tuple(lengths), place_groups(groups, lengths))

    def fallback(self, lengths: Sequence[int]) -> StepPlan:
        """Return the same plan, the only one."""
        return self(lengths)


def place_groups(
    groups: Sequence[Sequence[Sequence[int]]], lengths: Sequence[int], are_packs: bool = False
) -> PlacedRanks:
    """Return the placement of the sequences ``groups[number][rank]``.

    Args:
        groups: sequences of each rank in each group.
        lengths: tokens of each sequence.
        are_packs: whether the sequences of a rank in a group are one micro-batch, instead of one micro-batch each.

    Raises:
        ValueError: the ranks of a sequence are not contiguous, or a rank of a group has no sequence.
    """
    firsts, widths, orders = (np.zeros(len(lengths), dtype=np.int64) for _ in range(3))
    for number, group in enumerate(groups):
        for rank, seqs in enumerate(group):
            if not seqs:
                raise ValueError(f"rank {rank} has no sequence in group {number}")
            for index, seq in enumerate(seqs):
                order = number * _GROUP + (0 if are_packs else index)
                if not widths[seq]:
                    firsts[seq], orders[seq] = rank, order
                if orders[seq] != order or firsts[seq] + widths[seq] != rank:
                    raise ValueError(f"sequence {seq} is not at one place of contiguous ranks in group {number}")
                widths[seq] += 1
    return PlacedRanks(len(groups[0]), np.array(lengths, dtype=np.int64), firsts, widths, orders)


def group_numbers(ranks: PlacedRanks) -> Ints:
    """Return the group of each sequence: [n]."""
    return ranks.orders // _GROUP


def groups_of_rank(ranks: PlacedRanks, rank: int) -> Ints:
    """Return the group of each micro-batch of a rank, in running order: [micro-batches]."""
    is_mine = (ranks.first_ranks <= rank) & (rank < ranks.first_ranks + ranks.widths)
    return np.sort(group_numbers(ranks)[is_mine])


def with_barriers(forward: Callable[..., Any], runtime: Runtime, barrier: Callable[[], None]) -> Callable[..., Any]:
    """Return a forward step that waits at the barrier before each group except the first."""
    latest: Any = None
    coming: list[int] = []

    def run(data_iterator: Any, model: Any) -> Any:
        nonlocal latest, coming
        step = runtime.step.batch
        assert step is not None
        if step is not latest:
            latest = step
            coming = np.diff(groups_of_rank(step.plan.ranks, runtime.rank), prepend=0).tolist()  # type: ignore[arg-type]
        for _ in range(coming.pop(0)):
            barrier()
        return forward(data_iterator, model)

    return run


def use_hybrid_plans(training: Training, runtime: Runtime) -> Training:
    """Return the training with Megatron's plans and barriers."""
    import torch.distributed as dist

    from megatron.bytescale.core.parallel_state import hdp_group

    forward = with_barriers(training.forward_step, runtime, lambda: dist.barrier(hdp_group()))
    return replace(use_planner(training, runtime, HybridPlanner(runtime.run.cluster)), forward_step=forward)


def use_planner(training: Training, runtime: Runtime, planner: Planner) -> Training:
    """Return the training with the plans of another planner."""
    from megatron.bytescale.features.hdp.build import dataset_provider

    return replace(training, dataset_provider=dataset_provider(runtime, planner=planner))


def main() -> None:
    """Train with the flags of the command line."""
    from megatron.bytescale import train

    train.main(use_hybrid_plans)


if __name__ == "__main__":
    from scripts.bench.cluster import hybrid  # pickling the planner needs a module with a name

    hybrid.main()
