"""Simple plans for tests of other rooms: naive HDP and a static mesh."""

from __future__ import annotations

from collections.abc import Sequence

from bytescale_ext.plan.cost.cost_model import CostModel, StageCost
from bytescale_ext.plan.hdp.planner import HdpPlanner
from bytescale_ext.plan.step.plan import StepPlan
from bytescale_ext.plan.step.sizes import Cluster

_UNIT = StageCost(CostModel(a=0.0, b=1.0), CostModel(a=0.0, b=1.0))


def plan_naive(
    lengths: Sequence[int], num_ranks: int, tokens_per_rank: int, tokens_multiple: int = 1, aligned: bool = False
) -> StepPlan:
    """Plan with balance ``none``."""
    cluster = Cluster(num_ranks, tokens_per_rank)
    return HdpPlanner(cluster, (_UNIT,), tokens_multiple=tokens_multiple, balance="none", aligned=aligned)(lengths)


def plan_static(
    lengths: Sequence[int], num_ranks: int, tokens_per_rank: int, width: int, tokens_multiple: int = 1
) -> StepPlan:
    """Plan a static mesh of ``width``."""
    cluster = Cluster(num_ranks, tokens_per_rank)
    return HdpPlanner(cluster, (_UNIT,), tokens_multiple=tokens_multiple, static_width=width)(lengths)
