"""Predict the steps that ``speed.py`` measures, from what ``bytescale profile`` measured on the same ranks."""

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

_PAYLOAD = 0.95  # of a link's rate: the rest are headers of packets


def wall_cost(cost: ModelCost, topology: Topology) -> ModelCost:
    """Return the costs of a rank of an emulated cluster, in seconds of wall time.

    Args:
        cost: in processor seconds, except ``c``: that of unlimited links, in wall time.
        topology: its shares of cores and its links.
    """
    fastest = key_value_bytes(cost.shape, cost.tensor_parallel, cost.element_bytes) / cost.forward.c
    rates = [
        min(fastest, gbps * 1e9 / 8 * _PAYLOAD if gbps else fastest)
        for gbps in (topology.intra_gbps, topology.inter_gbps)
    ]
    share = topology.cores_per_rank

    def passes(one: CostModel) -> CostModel:
        return replace(one.scaled(1.0 / share), c=one.c * fastest / rates[0])

    return replace(
        cost,
        forward=passes(cost.forward),
        backward=passes(cost.backward),
        head_forward=cost.head_forward / share,
        head_backward=cost.head_backward / share,
        slowdown=max(1.0, rates[0] / rates[1]),
        source=f"{cost.source}; in wall time of {share:.3g} core, {rates[0] / 1e9:.3g} GB/s inside a node and "
        f"{rates[1] / 1e9:.3g} GB/s between nodes",
    )


def predicted_seconds(arm: Arm, case: Case, lengths: Sequence[int], cost: ModelCost) -> float | None:
    """Return the predicted time of a step's forward and backward passes; None for pipelines.

    Args:
        lengths: tokens of the documents of the step, in its order.
        cost: in wall time.
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
    """Return a plan of each group of Megatron's hybrid plan; the ranks wait for each other after each."""
    ranks = plan.ranks
    assert isinstance(ranks, PlacedRanks), f"{type(ranks)=}"
    groups, parts = group_numbers(ranks), []
    for number in range(int(groups.max()) + 1):
        seqs = np.flatnonzero(groups == number)
        columns = (column[seqs] for column in (ranks.lengths, ranks.first_ranks, ranks.widths, ranks.orders))
        placed = PlacedRanks(plan.num_ranks, *columns)
        parts.append(StepPlan(plan.num_ranks, plan.tokens_per_rank, tuple(placed.lengths.tolist()), placed))
    return parts
