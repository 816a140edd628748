"""Plan of one step for any framework: lengths and costs to the micro-batches of each rank."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bytescale_ext.plan.cost.cost_model import StageCost
from bytescale_ext.plan.hdp.packing import split_into_packs
from bytescale_ext.plan.hdp.planner import HdpPlanner
from bytescale_ext.plan.hdp.problem import checked_lengths
from bytescale_ext.plan.hdp.table import auto_balance
from bytescale_ext.plan.library.partition import Limits, partition
from bytescale_ext.plan.step.check import check_step_plan
from bytescale_ext.plan.step.placed import PlacedRanks
from bytescale_ext.plan.step.plan import StepPlan
from bytescale_ext.plan.step.sizes import Cluster


def plan_step(
    lengths: Sequence[int], cluster: Cluster, cost: StageCost | Sequence[StageCost], rings: bool = True
) -> StepPlan:
    """Return the checked plan of a step; ``plan.ranks[r]`` has the micro-batches of rank r.

    The call is pure: equal arguments give equal plans on every rank and machine.

    Args:
        lengths: tokens of each sequence, at least 1 each.
        cluster: data-parallel ranks, and C, the most tokens of a micro-batch on one rank.
        cost: cost of the whole model on one rank, or of each pipeline stage, the slowest stage last; with several
            stages each rank of ``cluster`` is a pipeline.
        rings: whether several ranks may share a sequence; if not, each sequence runs whole on one rank. Ranks may
            have different numbers of micro-batches, except in pipelines with rings: there plans have aligned slots.

    Raises:
        ValueError: a sequence is empty or longer than the ranks, or without rings one rank, can hold.
    """
    stages = (cost,) if isinstance(cost, StageCost) else tuple(cost)
    if rings:
        planner = HdpPlanner(cluster, stages, balance=auto_balance(aligned=len(stages) > 1))
        plan = planner(lengths)
    else:
        plan = _without_rings(lengths, cluster, stages)
    check_step_plan(plan, lengths)
    return plan


def _without_rings(lengths: Sequence[int], cluster: Cluster, stages: Sequence[StageCost]) -> StepPlan:
    """Return the plan whose sequences run whole, with equal work on each rank. Raises ValueError as ``plan_step``."""
    if not stages:
        raise ValueError("0 stages: give the cost of at least 1")
    if not cluster.has_equal_speeds:
        raise ValueError("ranks of different speeds need plans with rings")
    sizes, capacity = checked_lengths(lengths, cluster, 1), cluster.tokens_per_rank
    if len(sizes) and int(sizes.max()) > capacity:
        longest = int(sizes.argmax())
        raise ValueError(
            f"sequence {longest} has {sizes[longest]} tokens, more than one rank of {capacity} tokens holds; allow "
            f"rings or raise the tokens per rank to {sizes[longest]}"
        )
    tokens, model = sizes.astype(np.float64), stages[-1].both
    work = model.a * model.squares(tokens) + (model.b + model.g / capacity) * tokens
    limits = Limits(min(cluster.num_ranks, max(1, len(sizes))), len(sizes), False, sizes)
    owners = partition(work, limits)
    assert owners is not None, "parts without a capacity hold everything"
    in_order = np.argsort(-sizes, kind="stable")
    orders = np.zeros_like(sizes)
    orders[in_order] = split_into_packs(sizes[in_order], owners[in_order], capacity)
    placed = PlacedRanks(cluster.num_ranks, sizes, owners, np.ones_like(sizes), orders)
    return StepPlan(cluster.num_ranks, capacity, tuple(sizes.tolist()), placed)
