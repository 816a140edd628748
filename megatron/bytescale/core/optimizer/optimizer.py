"""Megatron's optimizers with Adam's states in pages of host memory.

Gradients are reduced, normed and clipped on the device as before. Then ``PagedAdam`` takes the step and copies each
page of results to the model's parameters, so Megatron's own copy of them is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

from bytescale_ext.config.memory.states import StateConfig
from bytescale_ext.states.adam import Owner, PagedAdam


def paged(kind: Any) -> Any:
    """Return the class that an optimizer of Megatron with float32 copies of parameters becomes.

    It has the only base ``kind``, so that an object can change to it. Its ``paged_adam`` has these copies in pages too.
    """

    class Paged(kind):  # type: ignore[misc]
        def prepare_grads(self) -> bool:
            """Attach the gradients, which are on the device."""
            self.paged_adam.begin_step()
            return bool(super().prepare_grads())

        def _copy_main_params_to_model_params(self) -> None:
            """Copy nothing: each page was copied once it was updated."""

    return Paged


PAGED: Final = {kind: paged(kind) for kind in (Float16OptimizerWithFloat16Params, DistributedOptimizer)}
"""By Megatron's class. Without float32 copies, ``FP32Optimizer`` stays what it is."""


def page_parts(parts: Sequence[Any], config: StateConfig, on_cuda: bool) -> None:
    """Move the states of all parts of Megatron's optimizer that have parameters to pages.

    Raises ValueError where the pages take more host memory than they may.
    """
    for part in parts:
        if owners := owners_of(part):
            part.paged_adam = PagedAdam(part.optimizer, owners, config, on_cuda)
            part.__class__ = PAGED.get(type(part), type(part))
            config = replace(config, host_bytes=config.host_bytes - part.paged_adam.table.host_bytes)


def owners_of(part: Any) -> list[Owner]:
    """Return the parameters of a part in its order, each with the model's parameter that gets its result."""
    if part.is_stub_optimizer:
        return []
    of_model, copies = [], []
    if isinstance(part, DistributedOptimizer):
        of_model, copies = part.shard_float16_groups, part.shard_fp32_from_float16_groups
    elif isinstance(part, Float16OptimizerWithFloat16Params):
        of_model, copies = part.float16_groups, part.fp32_from_float16_groups
    targets = {
        copy: target
        for of_group, of_copies in zip(of_model, copies, strict=True)
        for target, copy in zip(of_group, of_copies, strict=True)
    }
    parameters = [parameter for group in part.optimizer.param_groups for parameter in group["params"]]
    return [Owner(parameter, targets.get(parameter, parameter).detach().view(-1)) for parameter in parameters]
