"""The bytes of a process's model states: parameters, gradients and optimizer states."""

from __future__ import annotations

from typing import Final

from bytescale_ext.plan.cost.model_shape import ModelShape

GRADIENT_BYTES: Final = 4
"""Megatron accumulates gradients in float32 for every parameter type."""

MOMENT_BYTES: Final = 8
"""Adam's two moments, float32."""

MAIN_PARAMETER_BYTES: Final = 4
"""The float32 copy of a parameter of fewer bits."""


def num_parameters(shape: ModelShape, tensor_parallel: int = 1) -> float:
    """Count the parameters of one tensor-parallel rank: matrices, norms, embedding, output layer; no experts."""
    query = shape.num_heads * shape.head_dim
    key_value = 2 * shape.num_kv_heads * shape.head_dim
    mlp = (3 if shape.gated else 2) * shape.hidden * shape.ffn_hidden
    products = shape.num_layers * shape.hidden * (2 * query + key_value)
    products += (shape.num_layers - shape.num_expert_layers) * mlp
    ends = 2 * shape.vocab * shape.hidden
    norms = (2 * shape.num_layers + 1) * shape.hidden
    return (products + ends) / tensor_parallel + norms


def state_bytes(shape: ModelShape, element_bytes: int = 2, tensor_parallel: int = 1, optimizer_ranks: int = 1) -> float:
    """Return the bytes of parameters, gradients and Adam's states of one process.

    A 16-bit parameter takes 18 bytes, a 32-bit one 16. ``optimizer_ranks`` ranks share the optimizer's part
    (``--use-distributed-optimizer``; the same terms as in ZeRO, Rajbhandari et al. 2020, section 3.1).
    """
    main = MAIN_PARAMETER_BYTES if element_bytes < MAIN_PARAMETER_BYTES else 0
    each = element_bytes + GRADIENT_BYTES + (main + MOMENT_BYTES) / optimizer_ranks
    return num_parameters(shape, tensor_parallel) * each
