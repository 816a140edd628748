"""Cost of a model under a strategy, derived from the cost with other tensor-parallel ranks or of another model."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from bytescale_ext.plan.activation.load import COLLECTIVE_BYTES_PER_SECOND, COLLECTIVES_OF_A_LAYER
from bytescale_ext.plan.activation.operators import FUSED, LayerOperators
from bytescale_ext.plan.activation.tensors import EXPERT_LOAD, expert_bytes, layer_tensors, received_bytes
from bytescale_ext.plan.cost.cost_model import CostModel
from bytescale_ext.plan.cost.model_cost import ModelCost, with_expansions, with_second_forward
from bytescale_ext.plan.cost.model_shape import (
    ModelShape,
    expansion_flops,
    key_value_numbers,
    layer_flops_per_token,
)
from bytescale_ext.plan.search.strategy import FULL, Strategy

GATHERED_AGAIN: Final = 2
"""Number of gathers of a layer's inputs that its backward pass repeats for the gradients of weights (Korthikanti et al.
2022, section 4.2.2). On GPUs they overlap with the other products."""


def _sizes(
    shape: ModelShape, num_ranks: int, element_bytes: int, operators: LayerOperators
) -> tuple[float, float, float, float]:
    """Return a layer's linear FLOPs, attention, keys and activation bytes of a token on one tensor-parallel rank."""
    layers = layer_tensors(shape, element_bytes, num_ranks, num_ranks > 1, operators)
    experts = expert_bytes(shape, element_bytes, num_ranks, operators=operators)
    activations = sum(tensor.bytes_per_token for tensor in layers) + experts
    attention = shape.num_heads * (shape.head_dim + shape.value_dim) / num_ranks
    return layer_flops_per_token(shape) / num_ranks, attention, key_value_numbers(shape, num_ranks), activations


def scaled_cost(
    cost: ModelCost, shape: ModelShape, tensor_parallel: int, operators: LayerOperators = FUSED
) -> ModelCost:
    """Return the cost of a model on the device of ``cost``, with this number of tensor-parallel ranks.

    Work grows with its FLOPs, exchange with the bytes of keys, and memory with the bytes of ``layer_tensors`` under
    sequence parallelism. Received blocks cost a GPU queries and results of attention; they cost a CPU copies of keys.
    Tensor-parallel ranks share all of them evenly and wait for their collectives (Korthikanti et al. 2022, section
    4.2.2). A collective takes ``latency``, and a time for each byte: from ``cost``, else from
    ``COLLECTIVE_BYTES_PER_SECOND``. On CPU ranks the gathers that a backward pass repeats (``GATHERED_AGAIN``) overlap
    with nothing. The launches of a layer take as long as in ``cost``. Latents without seconds in ``cost`` take their
    expansion for each token that a rank receives, as in a measurement. The model and the ranks of ``cost`` give
    ``cost`` itself.

    Args:
        operators: operators of a layer, in ``cost`` and in the result.
    """
    if (shape, tensor_parallel) == (cost.shape, cost.tensor_parallel):
        return cost
    element = cost.element_bytes
    collective = cost.collective or (1.0 / COLLECTIVE_BYTES_PER_SECOND if tensor_parallel > 1 else 0.0)

    old = _sizes(cost.shape, cost.tensor_parallel, element, operators)
    new = _sizes(shape, tensor_parallel, element, operators)
    linear, attention, keys, kept = (after / before for after, before in zip(new, old, strict=True))
    waited = received_bytes(cost.shape, cost.tensor_parallel, element) * cost.collective
    waits = received_bytes(shape, tensor_parallel, element) * collective
    more = cost.latency * ((tensor_parallel > 1) - (cost.tensor_parallel > 1))

    expansions = [expansion_flops(*of) / of[1] for of in ((cost.shape, cost.tensor_parallel), (shape, tensor_parallel))]
    expanded = expansions[1] / expansions[0] if expansions[0] else 0.0
    flop_seconds = max(0.0, cost.forward.b - COLLECTIVES_OF_A_LAYER * waited) / old[0]
    added = 0.0 if cost.shape.latent is not None else expansions[1] * flop_seconds

    def of_pass(one: CostModel, repeated: int) -> CostModel:
        collectives = COLLECTIVES_OF_A_LAYER + repeated
        products, launches = max(0.0, one.b - collectives * waited) * linear, max(0.0, one.g + collectives * more)
        moved = replace(one, c=one.c * keys, h=one.h * (attention if cost.on_cuda else keys), e=one.e * expanded)
        return replace(moved, a=one.a * attention, b=products + collectives * waits, g=launches)

    passes = of_pass(cost.forward, 0), of_pass(cost.backward, 0 if cost.on_cuda else GATHERED_AGAIN)
    if added:
        passes = in_rings(*with_expansions(*passes, added))

    fewer = cost.tensor_parallel / tensor_parallel
    head = shape.hidden * shape.vocab / (cost.shape.hidden * cost.shape.vocab) * fewer
    return replace(
        cost,
        shape=shape,
        tensor_parallel=tensor_parallel,
        forward=passes[0],
        backward=passes[1],
        head_forward=cost.head_forward * head,
        head_backward=cost.head_backward * head,
        layer_bytes=cost.layer_bytes * kept,
        recompute_bytes=cost.recompute_bytes * shape.hidden / cost.shape.hidden * fewer,
        collective=collective,
    )


def in_rings(forward: CostModel, backward: CostModel) -> tuple[CostModel, CostModel]:
    """Return the costs with the expansion of latents in the work for received tokens, as in measured rings."""
    return replace(forward, h=forward.h + forward.e, e=0.0), replace(backward, h=backward.h + backward.e, e=0.0)


def strategy_cost(cost: ModelCost, strategy: Strategy, operators: LayerOperators = FUSED) -> ModelCost:
    """Return ``parallel_cost`` with the passes that a strategy repeats.

    Full recompute repeats the forward pass of each layer, and a loss in chunks computes the output layer again. The
    exchange of tokens (``with_expert_exchange``), the costs of the policy ``priced``, of recomputing some layers, and
    the memory of kept activations are not included (``CostedStrategy.of``).
    """
    cost = parallel_cost(cost, strategy, operators)
    return with_second_forward(cost, strategy.activations == FULL, strategy.loss_tokens is not None)


def parallel_cost(cost: ModelCost, strategy: Strategy, operators: LayerOperators = FUSED) -> ModelCost:
    """Return the cost of a model on a strategy's ranks, as a cost file has it.

    Budgets assume that experts that ranks share get ``EXPERT_LOAD`` times an even share of the tokens.

    ``cost``: cost on any number of tensor-parallel ranks.
    """
    cost = scaled_cost(cost, cost.shape, strategy.tensor_parallel, operators)
    if strategy.expert_parallel > 1:
        element, ranks = cost.element_bytes, cost.tensor_parallel
        loads = [expert_bytes(cost.shape, element, ranks, load, operators) for load in (EXPERT_LOAD, 1.0)]
        cost = replace(cost, layer_bytes=cost.layer_bytes + loads[0] - loads[1])
    return cost
