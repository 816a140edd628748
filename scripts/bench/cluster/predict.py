"""Predict the steps that ``speed.py`` measures, from what ``bytescale profile`` measured on the same ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from bytescale_ext.plan.cost.cost_model import CostModel, StageCost
from bytescale_ext.plan.cost.model_cost import ModelCost
from bytescale_ext.plan.cost.model_shape import key_value_bytes
from bytescale_ext.plan.cost.shards import ShardTable
from bytescale_ext.plan.evaluate.replay import replay_rows
from bytescale_ext.plan.hdp.planner import HdpPlanner
from bytescale_ext.plan.step.placed import PlacedRanks
from bytescale_ext.plan.step.plan import StepPlan
from bytescale_ext.plan.step.sizes import Cluster
from scripts.bench.cluster.cases import Arm, Case
from scripts.bench.cluster.hybrid import HybridPlanner, group_numbers
from scripts.cluster.spec import ELEMENT_BYTES
from scripts.cluster.topology import Topology

_PAYLOAD = 0.95  # of a link's rate: the rest are headers of packets


def wall_cost(cost: ModelCost, cores: float, gbps: float) -> ModelCost:
    """Return the costs of a rank with a share of a core behind a link, in seconds of wall time.

    Args:
        cost: in processor seconds, except ``c``: that of unlimited links, in wall time.
        cores: processor seconds in a second of the rank.
        gbps: of the link; 0: unlimited.
    """
    measured_rate = key_value_bytes(cost.shape, cost.tensor_parallel, ELEMENT_BYTES[cost.dtype]) / cost.forward.c
    slower = max(1.0, measured_rate / (gbps * 1e9 / 8 * _PAYLOAD)) if gbps else 1.0

    def passes(one: CostModel) -> CostModel:
        return replace(one.scaled(1.0 / cores), c=one.c * slower)

    return replace(
        cost,
        forward=passes(cost.forward),
        backward=passes(cost.backward),
        head_forward=cost.head_forward / cores,
        head_backward=cost.head_backward / cores,
        source=f"{cost.source}; in wall time of {cores:.3g} core, links {gbps or 'unlimited'} Gbit/s",
    )


def predicted_seconds(
    arm: Arm, case: Case, lengths: Sequence[int], inside: StageCost, between: StageCost
) -> float | None:
    """Return the predicted time of a step's forward and backward passes; None for pipelines.

    Args:
        lengths: tokens of the documents of the step, in its order.
        inside, between: costs with the links inside and between nodes.
    """
    cluster = Cluster(case.num_ranks, arm.tokens_per_rank, case.ranks_per_node)
    if arm.num_stages > 1:
        return None
    if arm.balance is None:
        return sum(
            _makespan(part, case, inside.both, between.both) for part in hybrid_parts(HybridPlanner(cluster)(lengths))
        )
    width = arm.width(case)
    planner = HdpPlanner(cluster, (inside,), balance=arm.balance, static_width=int(width) if width else None)
    return _makespan(planner(lengths), case, inside.both, between.both)


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


def _makespan(plan: StepPlan, case: Case, inside: CostModel, between: CostModel) -> float:
    """Return the time of a plan; a micro-batch with a ring over several nodes exchanges at the speed between them."""
    table, placed = ShardTable.of(plan), plan.ranks
    assert isinstance(placed, PlacedRanks), f"{type(placed)=}"
    last_ranks = placed.first_ranks + placed.widths - 1
    crosses = placed.first_ranks // case.ranks_per_node != last_ranks // case.ranks_per_node
    is_between = np.zeros(table.num_rows, dtype=bool)
    np.logical_or.at(is_between, table.rows, crosses[table.seqs])
    return replay_rows(table, np.where(is_between, table.row_costs(between), table.row_costs(inside))).makespan


def topology_costs(cost: ModelCost, topology: Topology) -> tuple[ModelCost, ModelCost]:
    """Return the costs with the links inside and between nodes, in wall time."""
    inside, between = (
        wall_cost(cost, topology.cores_per_rank, gbps) for gbps in (topology.intra_gbps, topology.inter_gbps)
    )
    return inside, between
