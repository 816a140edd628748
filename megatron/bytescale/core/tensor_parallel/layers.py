"""Linear layers of experts: variants of Megatron's that train where the originals cannot."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, get_data_parallel_rng_tracker_name

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


class ExpertRowParallelLinear(RowParallelLinear):
    """Megatron's down-projection of an expert, [..., in] to [..., out], which allows biases to be added in place.

    Megatron's experts add their biases in place. If a rank has all experts, each of them whole, Megatron's layer
    reduces over that single rank and returns a view, which autograd does not allow to change in place. This layer skips
    that reduction.
    """

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        assert self.is_expert, "only layers of experts add their own biases"
        self.explicit_expert_comm |= self.tp_group.size() == 1


class DuplicatedLinear(torch.nn.Linear):
    """A linear layer with the same weights on all tensor-parallel ranks, as Megatron's ``TELinear`` is for latents.

    Under sequence parallelism each rank has its own tokens, and Megatron sums the weight gradients over the ranks.
    """

    def __init__(
        self, inputs: int, outputs: int, config: TransformerConfig, draw: Callable[[torch.Tensor], object]
    ) -> None:
        """Draw weights [outputs, inputs] with ``draw``, equal on tensor-parallel ranks; biases are 0."""
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        super().__init__(inputs, outputs, config.add_bias_linear, device, config.params_dtype)
        if config.perform_initialization:
            with torch.no_grad(), get_cuda_rng_tracker().fork(get_data_parallel_rng_tracker_name()):
                draw(self.weight)
            if self.bias is not None:
                torch.nn.init.zeros_(self.bias)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        """Return the product [..., outputs] of [..., inputs] with the bias added, and None, as ``TELinear`` does."""
        return super().forward(x), None
