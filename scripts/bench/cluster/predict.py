"""Predict the steps that ``speed.py`` measures, from a profile of the same ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from bytescale_ext.plan.cost.cost_model import CostModel
from bytescale_ext.plan.cost.model_cost import ModelCost
from bytescale_ext.plan.cost.model_shape import key_value_bytes
from bytescale_ext.plan.evaluate.replay import replay
from bytescale_ext.plan.hdp.planner import HdpPlanner
from bytescale_ext.plan.step.placed import PlacedRanks
from bytescale_ext.plan.step.plan import StepPlan
from bytescale_ext.plan.step.sizes import Cluster
from scripts.bench.cluster.cases import Arm, Case
from scripts.bench.cluster.hybrid import HybridPlanner, group_numbers
from scripts.cluster.topology import Topology

_PAYLOAD = 0.95  # share of a link's rate that packet headers leave


def wall_cost(cost: ModelCost, topology: Topology) -> ModelCost:
    """Return the costs of a rank of an emulated cluster, in seconds of wall time.

    Args:
        cost: costs in processor seconds, except ``c``, which is wall time of unlimited links.
        topology: shares of cores, and links.
    """
    fastest = key_value_bytes(cost.shape, cost.tensor_parallel, cost.element_bytes) / cost.forward.c
    rates = [
        min(fastest, gbps * 1e9 / 8 * _PAYLOAD if gbps else fastest)
        for gbps in (topology.intra_gbps, topology.inter_gbps)
    ]
    share = topology.cores_per_rank

    def in_wall_time(direction: CostModel) -> CostModel:
        return replace(direction.scaled(1.0 / share), c=direction.c * fastest / rates[0])

    return replace(
        cost,
        forward=in_wall_time(cost.forward),
        backward=in_wall_time(cost.backward),
        head_forward=cost.head_forward / share,
        head_backward=cost.head_backward / share,
        slowdown=max(1.0, rates[0] / rates[1]),
        source=f"{cost.source}; in wall time of {share:.3g} core, {rates[0] / 1e9:.3g} GB/s inside a node and "
        f"{rates[1] / 1e9:.3g} GB/s between nodes",
    )


def predicted_seconds(arm: Arm, case: Case, lengths: Sequence[int], cost: ModelCost) -> float | None:
    """Return the predicted seconds of a step's forward and backward passes; None for pipelines.

    Args:
        lengths: tokens of the documents of the step, in its order.
        cost: costs in wall time.
    """
    if arm.num_stages > 1:
        return None
    cluster = Cluster(case.num_ranks, arm.tokens_per_rank, case.ranks_per_node, arm.ring_forms)
    stage = cost.whole().on(cost.nodes(cluster))
    if arm.balance is None:
        return sum(replay(part, stage.both).makespan for part in hybrid_parts(HybridPlanner(cluster)(lengths)))
    width = arm.width(case)
    planner = HdpPlanner(cluster, (stage,), balance=arm.balance, static_width=int(width) if width else None)
    return replay(planner(lengths), stage.both).makespan


def hybrid_parts(plan: StepPlan) -> list[StepPlan]:
    """Return a plan for each group of Megatron's hybrid plan; the ranks wait for each other between groups."""
    ranks = plan.ranks
    assert isinstance(ranks, PlacedRanks), f"{type(ranks)=}"
    groups, parts = group_numbers(ranks), []
    for number in range(int(groups.max()) + 1):
        seqs = np.flatnonzero(groups == number)
        columns = (column[seqs] for column in (ranks.lengths, ranks.first_ranks, ranks.widths, ranks.orders))
        placed = PlacedRanks(plan.num_ranks, *columns)
        parts.append(StepPlan(plan.num_ranks, plan.tokens_per_rank, tuple(placed.lengths.tolist()), placed))
    return parts
