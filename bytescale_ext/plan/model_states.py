"""What a process holds beside activations, from start to end: parameters, gradients and optimizer states."""

from __future__ import annotations

from typing import Final

from bytescale_ext.plan.cost import ModelShape

GRADIENT_BYTES: Final = 4
"""Megatron adds gradients up in float32, whatever the parameters are."""

MOMENT_BYTES: Final = 8
"""Adam's two moments, float32."""

MAIN_PARAMETER_BYTES: Final = 4
"""The float32 copy of a parameter of fewer bits."""


def num_parameters(shape: ModelShape, tensor_parallel: int = 1) -> float:
    """Parameters of one tensor-parallel rank: matrices, norm weights, embedding and output layer; without experts."""
    query = shape.num_heads * shape.head_dim
    key_value = 2 * shape.num_kv_heads * shape.head_dim
    mlp = (3 if shape.gated else 2) * shape.hidden * shape.ffn_hidden
    products = shape.num_layers * shape.hidden * (2 * query + key_value)
    products += (shape.num_layers - shape.num_expert_layers) * mlp
    ends = 2 * shape.vocab * shape.hidden
    norms = (2 * shape.num_layers + 1) * shape.hidden
    return (products + ends) / tensor_parallel + norms


def state_bytes(shape: ModelShape, element_bytes: int = 2, tensor_parallel: int = 1, optimizer_ranks: int = 1) -> float:
    """Bytes of parameters, gradients and Adam's states of one process.

    18 for each parameter of 16 bits, 16 for one of 32; ``optimizer_ranks`` share what is not parameter or gradient
    (``--use-distributed-optimizer``; Megatron-LM's page on it has the same table, ZeRO (Rajbhandari et al. 2020,
    section 3.1) the same terms).
    """
    main = MAIN_PARAMETER_BYTES if element_bytes < MAIN_PARAMETER_BYTES else 0
    each = element_bytes + GRADIENT_BYTES + (main + MOMENT_BYTES) / optimizer_ranks
    return num_parameters(shape, tensor_parallel) * each
