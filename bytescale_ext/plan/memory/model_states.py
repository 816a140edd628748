"""Bytes of a process's model states: parameters, gradients and optimizer states."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from bytescale_ext.plan.cost.model_shape import ModelShape, later_layer_weights

GRADIENT_BYTES: Final = 4
"""Bytes of a gradient. Megatron accumulates gradients in float32 for every parameter type."""

MOMENT_BYTES: Final = 8
"""Bytes of Adam's two moments of a parameter, in float32."""

MAIN_PARAMETER_BYTES: Final = 4
"""Bytes of the float32 copy of a 16-bit parameter."""


@dataclass(frozen=True, slots=True)
class StateSizes:
    """Bytes of the gradient and the optimizer's states of one parameter.

    Attributes:
        gradient: gradient, summed over the micro-batches of a step, as ranks exchange it.
        main: copy of a 16-bit parameter that the optimizer updates.
        moments: moments of a parameter.
        end_moments: moments of a parameter of an embedding or output layer; None: ``moments``.
        update: memory of the optimizer's update, until the update of all parameters ends.
        end_update: the same for a parameter of an embedding or output layer only.
        matrix_update: memory of the update of the largest matrix, for each of its numbers; updates of matrices follow
            one another, and the update of embedding and output layer is apart.
    """

    gradient: float = GRADIENT_BYTES
    main: float = MAIN_PARAMETER_BYTES
    moments: float = MOMENT_BYTES
    end_moments: float | None = None
    update: float = 0.0
    end_update: float = 0.0
    matrix_update: float = 0.0

    def optimizer(self, element_bytes: int, is_end: bool = False) -> float:
        """Return the bytes of the optimizer's states of a parameter; ``is_end``: of an embedding or output layer."""
        moments = self.end_moments if is_end and self.end_moments is not None else self.moments
        return moments + (self.main if element_bytes < MAIN_PARAMETER_BYTES else 0)


FUSED_ADAM: Final = StateSizes()
"""Adam with float32 states, of TransformerEngine or Apex."""


def num_parameters(shape: ModelShape, tensor_parallel: int = 1) -> float:
    """Return ``stage_parameters`` of a single stage with the whole model."""
    return stage_parameters(shape, tensor_parallel, True, True)


def stage_parameters(shape: ModelShape, tensor_parallel: int, has_embedding: bool, has_head: bool) -> float:
    """Return the number of parameters of a stage on one tensor-parallel rank, without ``expert_parameters``.

    Matrices, norms, routers, projections of latents, shared experts, embedding and output layer count.
    """
    products = shape.num_layers * shape.projection_weights
    dense = (shape.num_layers - shape.num_expert_layers) * shape.ffn_hidden
    products += shape.mlp_matrices * shape.hidden * (dense + shape.num_expert_layers * shape.shared_ffn_hidden)
    ends = (has_embedding + has_head) * shape.vocab * shape.hidden
    norms = (2 * shape.num_layers + has_head) * shape.hidden
    norms += 0 if shape.latent is None else shape.num_layers * shape.latent.norm_weights
    routers = shape.num_expert_layers * shape.shared_weights
    if has_head and shape.later_layers:  # these layers also embed later tokens
        shared = replace(shape, expert_ffn_hidden=shape.shared_ffn_hidden, num_experts=0, expert_latent=0)
        products += shape.later_modules * later_layer_weights(shared)
        routers += shape.later_modules * shape.later_experts * shape.shared_weights
        norms += 5 * shape.later_modules * shape.hidden
        ends += (not has_embedding) * shape.vocab * shape.hidden
    return (products + ends) / tensor_parallel + norms + routers


def expert_parameters(shape: ModelShape, tensor_parallel: int = 1, expert_parallel: int = 1) -> float:
    """Return the number of expert parameters of a process.

    ``expert_parallel`` HDP ranks share the experts of each layer. Tensor-parallel ranks share each expert, as in
    Megatron without ``--expert-tensor-parallel-size``.
    """
    num_layers = shape.num_expert_layers + shape.later_modules * shape.later_experts
    if not num_layers:
        return 0.0
    of_layer = shape.num_experts * shape.mlp_matrices * shape.token_width * shape.expert_width
    return num_layers * of_layer / expert_parallel / tensor_parallel


def largest_matrix(shape: ModelShape, tensor_parallel: int = 1, expert_tensor_parallel: int = 1) -> float:
    """Return the numbers of the largest matrix of a layer on one rank. Each expert has matrices of its own."""
    gated = 2 if shape.gated else 1
    dense = shape.ffn_hidden if shape.num_expert_layers < shape.num_layers else 0
    projections = shape.num_heads * max(shape.head_dim, shape.value_dim)
    widest = max(projections, gated * max(dense, shape.shared_ffn_hidden)) / tensor_parallel
    of_expert = shape.token_width * gated * shape.expert_width / expert_tensor_parallel
    return max(shape.hidden * max(widest, shape.expert_latent), of_expert)


def state_bytes(shape: ModelShape, element_bytes: int = 2, tensor_parallel: int = 1, optimizer_ranks: int = 1) -> float:
    """Return the bytes of parameters, gradients and Adam's states of one process, without ``expert_parameters``.

    A 16-bit parameter takes 18 bytes, and a 32-bit parameter 16 bytes. ``optimizer_ranks`` ranks share Adam's states
    (``--use-distributed-optimizer``; the same terms as in ZeRO, Rajbhandari et al. 2020, section 3.1).
    """
    return num_parameters(shape, tensor_parallel) * parameter_bytes(element_bytes, optimizer_ranks)


def parameter_bytes(element_bytes: int, optimizer_ranks: int) -> float:
    """Return the bytes of one parameter, its gradient and its part of the optimizer; see ``state_bytes``."""
    return element_bytes + FUSED_ADAM.gradient + FUSED_ADAM.optimizer(element_bytes) / optimizer_ranks
