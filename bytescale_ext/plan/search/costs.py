"""The cost of a model under a strategy, derived from the cost of other tensor-parallel ranks or of another model."""

from __future__ import annotations

from dataclasses import replace

from bytescale_ext.plan.activation.load import COLLECTIVE_BYTES_PER_SECOND, COLLECTIVES_OF_A_LAYER
from bytescale_ext.plan.activation.tensors import layer_tensors, received_bytes
from bytescale_ext.plan.cost.cost_model import CostModel
from bytescale_ext.plan.cost.model_cost import ModelCost
from bytescale_ext.plan.cost.model_shape import ModelShape, key_value_bytes, linear_flops_per_token
from bytescale_ext.plan.search.strategy import FULL, Strategy


def scaled_cost(cost: ModelCost, shape: ModelShape, tensor_parallel: int) -> ModelCost:
    """Return the cost of a model on the device of ``cost``, with this number of tensor-parallel ranks.

    Work grows with its FLOPs, exchange with the bytes of keys, and memory with the bytes of ``layer_tensors`` under
    sequence parallelism. Tensor-parallel ranks share all of them evenly and wait for their collectives (Korthikanti et
    al. 2022, section 4.2.2), as long for each byte as the cost says, or as ``COLLECTIVE_BYTES_PER_SECOND``. The cost of
    launches of a layer stays. The model and the ranks of ``cost`` give ``cost`` itself.
    """
    if (shape, tensor_parallel) == (cost.shape, cost.tensor_parallel):
        return cost
    collective = cost.collective or (1.0 / COLLECTIVE_BYTES_PER_SECOND if tensor_parallel > 1 else 0.0)

    def sizes(of: ModelShape, ranks: int) -> tuple[float, float, float, float]:
        """Return linear FLOPs of a layer, attention, keys and activations of a token on one rank."""
        layer = linear_flops_per_token(of) - 2.0 * of.hidden * of.vocab
        tensors = sum(tensor.bytes_per_token for tensor in layer_tensors(of, 2, ranks, ranks > 1))
        return (layer / of.num_layers / ranks, of.num_heads * of.head_dim / ranks,
                of.num_kv_heads * of.head_dim / ranks, tensors)  # fmt: skip

    old, new = sizes(cost.shape, cost.tensor_parallel), sizes(shape, tensor_parallel)
    linear, attention, keys, kept = (after / before for after, before in zip(new, old, strict=True))
    waited = COLLECTIVES_OF_A_LAYER * received_bytes(cost.shape, cost.tensor_parallel) * cost.collective
    waits = COLLECTIVES_OF_A_LAYER * received_bytes(shape, tensor_parallel) * collective

    def of_pass(one: CostModel) -> CostModel:
        products = max(0.0, one.b - waited) * linear
        return replace(one, a=one.a * attention, b=products + waits, c=one.c * keys, h=one.h * keys)

    fewer = cost.tensor_parallel / tensor_parallel
    head = shape.hidden * shape.vocab / (cost.shape.hidden * cost.shape.vocab) * fewer
    return replace(
        cost,
        shape=shape,
        tensor_parallel=tensor_parallel,
        forward=of_pass(cost.forward),
        backward=of_pass(cost.backward),
        head_forward=cost.head_forward * head,
        head_backward=cost.head_backward * head,
        layer_bytes=cost.layer_bytes * kept,
        recompute_bytes=cost.recompute_bytes * shape.hidden / cost.shape.hidden * fewer,
        collective=collective if tensor_parallel > 1 else cost.collective,
    )


def strategy_cost(cost: ModelCost, strategy: Strategy) -> ModelCost:
    """Return the cost of a model under a strategy, from its cost on any number of tensor-parallel ranks.

    Full recompute repeats the forward pass of each layer and keeps its input, and keys, which a slice that waits keeps
    too. A loss in chunks computes the output layer again. What the policy ``priced`` takes is not in it (``Case.of``).
    """
    cost = scaled_cost(cost, cost.shape, strategy.tensor_parallel)
    if strategy.activations == FULL:
        keys = key_value_bytes(cost.shape, cost.tensor_parallel, cost.element_bytes)
        cost = replace(cost, backward=cost.backward + cost.forward, layer_bytes=cost.recompute_bytes + keys)
    if strategy.loss_tokens is not None:
        cost = replace(cost, head_backward=cost.head_backward + cost.head_forward)
    return cost
