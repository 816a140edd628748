"""Seconds of pipeline stages, which planners balance and forecasts sum up."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from bytescale_ext.plan.activation.load import COLLECTIVE_BYTES_PER_SECOND
from bytescale_ext.plan.cost.cost_model import CostModel, StageCost
from bytescale_ext.plan.cost.model_cost import (
    ModelCost,
    expert_share,
    without_score_products,
    without_second_forward,
)
from bytescale_ext.plan.cost.model_shape import key_value_bytes
from bytescale_ext.plan.schedule.slices import layer_cost
from bytescale_ext.plan.setup.setup import FULL, Mesh, Setup
from bytescale_ext.plan.step.sizes import Cluster


def stage_costs(setup: Setup) -> tuple[StageCost, ...]:
    """Return the seconds of each pipeline stage, without the time that an activation policy adds."""
    return layer_costs(setup, setup.mesh.stage_layers)


def layer_costs(setup: Setup, num_layers: tuple[int, ...]) -> tuple[StageCost, ...]:
    """Return the seconds of stages with these numbers of layers. The last stage has the output layer."""
    cost, nodes, last = setup.cost, setup.cost.nodes(setup.cluster), len(num_layers) - 1
    link = setup.budget.link_bytes_per_second
    return tuple(
        _with_padded_experts(setup, cost.stage(layers, stage == last, link), layers, stage == last).on(nodes)
        for stage, layers in enumerate(num_layers)
    )


def _with_padded_experts(setup: Setup, cost: StageCost, num_layers: int, has_head: bool) -> StageCost:
    """Add the mean time of a pass that FP8's padding of expert rows takes. Measured costs include it."""
    shape, padding = setup.shape, setup.expert_padding / 2
    if not padding or setup.measured:
        return cost
    per_token = expert_share(shape, num_layers, has_head) * padding / shape.experts_per_token
    forward, backward = (replace(each, g=each.g + per_token * each.b) for each in (cost.forward, cost.backward))
    return replace(cost, forward=forward, backward=backward)


def cost_source(setup: Setup) -> str:
    """Return the origin of a setup's costs in words. Files of earlier versions have no costs of blocks of rings."""
    if not setup.measured:
        return setup.cost.source
    one = setup.cost.forward
    lacks_blocks = setup.cluster.num_ranks > 1 and not (one.h or one.m or one.e)
    note = ", where the blocks of a ring cost nothing: profile again" if lacks_blocks else ""
    return f"--cost-file, measured on {setup.cost.device}{note}"


@lru_cache(maxsize=256)
def slowest_stage(setup: Setup) -> tuple[int, StageCost]:
    """Return the number and the cost of the stage that is slowest with a full micro-batch."""
    tokens = setup.cluster.tokens_per_rank
    return max(enumerate(stage_costs(setup)), key=lambda stage: stage[1].both.sequence_cost(tokens, 1))


def equal_cost(setup: Setup) -> CostModel | None:
    """Return the cost that is equal in all slices of a document, or None if their tokens are equal."""
    if setup.sequences.partition == "even":
        return None
    if setup.sequences.partition == "flops":
        return layer_cost(setup.shape, "flops").both
    return slowest_stage(setup)[1].both


def recomputed(setup: Setup, num_layers: tuple[int, ...]) -> tuple[StageCost, ...]:
    """Return the seconds of (virtual) stages with these layers, whose first layers run again in the backward pass."""
    most, forward = setup.numerics.recomputed_layers, setup.cost.forward
    return tuple(
        replace(stage, backward=stage.backward + forward.scaled(min(layers, most)))
        for stage, layers in zip(layer_costs(setup, num_layers), num_layers, strict=True)
    )


def byte_seconds(cost: ModelCost, cluster: Cluster) -> float:
    """Return the seconds per byte that a rank receives from the HDP ranks while all links of a node are busy.

    Inside a node it is the cost file's exchange of keys, or ``COLLECTIVE_BYTES_PER_SECOND``. Between nodes, n ranks of
    a node share the border as in hierarchical rings (``Nodes.hops``): ``slowdown / n`` times as long, if that is more.
    """
    keys = key_value_bytes(cost.shape, cost.tensor_parallel, cost.element_bytes)
    inside = cost.forward.c / keys or 1.0 / COLLECTIVE_BYTES_PER_SECOND
    if cluster.node_ranks == cluster.num_ranks:
        return inside
    return inside * max(1.0, cost.slowdown / cluster.node_ranks)


def exchange_seconds(cost: ModelCost, expert_parallel: int, cluster: Cluster) -> float:
    """Return the seconds per token to send its copies to the experts of a layer and their results back.

    A token has a copy for each of its experts. The ranks that share experts have equal parts of the copies
    (all-to-all: Fedus et al. 2022, section 2.2). The ranks are neighbours, in the same node if it has enough ranks.
    """
    node = min(expert_parallel, cluster.node_ranks)
    group = Cluster(expert_parallel, cluster.tokens_per_rank, node if not expert_parallel % node else None)
    copies = cost.shape.num_expert_layers / cost.shape.num_layers * cost.shape.experts_per_token
    copy_bytes = cost.shape.token_width * cost.element_bytes / cost.tensor_parallel
    return 2 * copies * copy_bytes * (1 - 1 / expert_parallel) * byte_seconds(cost, group)


def with_expert_exchange(cost: ModelCost, mesh: Mesh, cluster: Cluster, recompute: str) -> ModelCost:
    """Return the costs with the exchange of tokens between ranks that share experts, which no cost file has.

    ``recompute``: as in ``Numerics``; if all layers are recomputed, the backward pass repeats the exchange.
    """
    return _with_exchange(cost, exchange_of(cost, mesh, cluster), recompute)


def cost_of_file(setup: Setup) -> ModelCost:
    """Return the costs of a setup as a cost file has them, without exchange of experts, logits and recomputation."""
    numerics, seconds = setup.numerics, exchange_of(setup.cost, setup.mesh, setup.cluster)
    cost = _with_exchange(setup.cost, -seconds, numerics.recompute)
    if numerics.measures_logits:
        cost = without_score_products(cost, numerics.recompute == FULL)
    return without_second_forward(cost, numerics.recompute == FULL, numerics.loss_tokens is not None)


def exchange_of(cost: ModelCost, mesh: Mesh, cluster: Cluster) -> float:
    """Return ``exchange_seconds`` of a mesh; 0 if ranks share no experts."""
    return exchange_seconds(cost, mesh.expert_parallel, cluster) if mesh.expert_parallel > 1 else 0.0


def _with_exchange(cost: ModelCost, seconds: float, recompute: str) -> ModelCost:
    backward = seconds * (2 if recompute == FULL else 1)
    return replace(
        cost,
        forward=replace(cost.forward, b=cost.forward.b + seconds),
        backward=replace(cost.backward, b=cost.backward.b + backward),
    )
