"""Clipping of gradients in host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

from bytescale_ext.config.memory.states import StateConfig

if TYPE_CHECKING:
    import torch

    from megatron.bytescale.runtime import Runtime

SMALL: Final = 1e-6
"""Added to the norm, as in Megatron."""


def wrap_clip_grad_by_total_norm_fp32(original: Callable[..., None], runtime: Runtime) -> Callable[..., None]:
    """Clip gradients in host memory on the processor; Megatron's kernels read only device memory."""

    def clip_grad_by_total_norm_fp32(
        parameters: Iterable[torch.Tensor],
        max_norm: float,
        total_norm: float | torch.Tensor,
        use_decoupled_grad: bool = False,
    ) -> None:
        states = runtime.run.find(StateConfig)
        if states is None or states.stage == 1:
            original(parameters, max_norm, total_norm, use_decoupled_grad)
            return
        share = float(max_norm / (total_norm + SMALL))  # the norm is on the device if TransformerEngine is installed
        if share < 1.0:
            for gradient in [parameter.grad for parameter in parameters if parameter.grad is not None]:
                gradient.mul_(share)

    return clip_grad_by_total_norm_fp32
