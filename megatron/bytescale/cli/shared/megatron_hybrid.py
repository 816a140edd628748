"""The installed Megatron's scheduler of hybrid context parallelism, to simulate and to run its plans."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from bytescale_ext.plan.evaluate.schedulers import NotApplicable, Outcome, Scenario, run_groups
from bytescale_ext.plan.step.sizes import Cluster


@dataclass(frozen=True)
class _RankCount:
    """A process group with the only method that the scheduler calls."""

    num_ranks: int

    def size(self) -> int:
        return self.num_ranks


def megatron_hybrid(lengths: Sequence[int], scenario: Scenario) -> Outcome:
    """Run ``BalancedCPScheduler`` of ``--hybrid-context-parallel``: powers of two, one sub-sample in each forward.

    Raises:
        NotApplicable: pipelines, which Megatron's arguments refuse, and the cases of ``hybrid_groups``.
    """
    if len(scenario.stages) > 1:
        raise NotApplicable("--hybrid-context-parallel refuses pipelines")
    began = time.perf_counter()
    groups = hybrid_groups(lengths, scenario.cluster)
    return run_groups(groups, lengths, scenario, time.perf_counter() - began)


def hybrid_groups(lengths: Sequence[int], cluster: Cluster) -> list[list[list[int]]]:
    """Return groups[number][rank] -> sequences in running order; ranks meet at a barrier after each group.

    Raises:
        NotApplicable: the number of ranks is not a power of two, so Megatron has no groups; or the scheduler fails on
            these lengths.
    """
    num_ranks = cluster.num_ranks
    if num_ranks & (num_ranks - 1):
        raise NotApplicable(f"{num_ranks} ranks are not a power of two, so Megatron has no groups for them")
    from megatron.core.pipeline_parallel.hybrid_cp_schedule import BalancedCPScheduler

    scheduler = BalancedCPScheduler(cluster.tokens_per_rank, _RankCount(num_ranks))
    samples = [(seq, int(length)) for seq, length in enumerate(lengths)]
    try:
        groups: list[list[list[int]]] = scheduler.get_groups_and_subsamples(samples, None)[1]
    except (AssertionError, IndexError, KeyError) as error:
        raise NotApplicable(f"it stops on these lengths: {type(error).__name__} {error}") from error
    return groups
