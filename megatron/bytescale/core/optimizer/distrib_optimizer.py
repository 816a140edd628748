"""Saves and loads Megatron's distributed optimizer with torch's own Adam, without TransformerEngine and Apex.

Megatron cannot load such an optimizer. It asks for the step before torch has created any state, and it looks for the
step among the sharded tensors. It copies into parameters that require gradients (``--ckpt-format torch``). It gives all
parameters the same step tensor, which each of them would increment. Megatron also cannot save an optimizer without
parameters, because it has no step. The expert optimizer is empty on a pipeline stage without experts.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer

from bytescale_ext.config.logits import LogitConfig
from bytescale_ext.config.memory.states import StateConfig
from bytescale_ext.states.group_counts import GroupCountingAdam
from megatron.bytescale.core.distributed.distributed_data_parallel import move_states
from megatron.bytescale.core.distributed.host_build import CopiesInHostMemory
from megatron.bytescale.core.distributed.param_and_grad_buffer import taking_gradients
from megatron.bytescale.core.optimizer.late import LateUpdates, flush_first
from megatron.bytescale.core.optimizer.optimizer import page_parts, use_torch_adam
from megatron.bytescale.core.optimizer.qk_clip import main_weights
from megatron.bytescale.registry import specialize

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.optimizer import MegatronOptimizer

    from megatron.bytescale.runtime import Runtime


def wrap_get_megatron_optimizer(original: Callable[..., object], runtime: Runtime) -> Callable[..., object]:
    """Build Megatron's optimizer, and add the state and hooks that each part with torch's Adam needs.

    Its states are stored in pages if the run's configuration says so.
    """

    def get_megatron_optimizer(
        config: OptimizerConfig, model_chunks: list[DistributedDataParallel], *args: object, **kwargs: object
    ) -> MegatronOptimizer:
        states, on_cuda = runtime.run.find(StateConfig), runtime.run.process.on_cuda
        blocks, gradients = runtime.parts.host_blocks, None
        if states is not None and blocks is not None:
            gradients = move_states(model_chunks, states, blocks, on_cuda)
        with CopiesInHostMemory() if states is not None else nullcontext():
            optimizer = original(config, model_chunks, *args, **kwargs)
        parts = getattr(optimizer, "chained_optimizers", [optimizer])
        if states is not None:
            use_torch_adam(parts)
            page_parts(parts, states.without(gradients.host_bytes if gradients else 0, 0), on_cuda)
        if states is not None and states.update_steps:
            late_updates = LateUpdates([part.paged_adam for part in parts if hasattr(part, "paged_adam")])
            runtime.add_parts(late_updates=late_updates)
            flush_first(model_chunks, late_updates)
        if runtime.run.find(LogitConfig) is not None:
            runtime.add_parts(main_weights=main_weights(parts))
        for part in parts if gradients is not None else ():
            specialize(part, taking_gradients)
            part.host_gradients = gradients
        for part in filter(is_over_torch_adam, parts):
            if states is None:
                begin_state(part.optimizer)
            if isinstance(part.optimizer, GroupCountingAdam):
                continue  # Megatron reads its steps from the parameter groups
            part.optimizer.register_load_state_dict_post_hook(separate_steps)
            if not part.optimizer.state and part is not parts[0]:
                part.optimizer.register_state_dict_post_hook(partial(add_step, parts[0].optimizer))
        return optimizer

    return get_megatron_optimizer


def wrap_load_state_dict(original: Callable[..., None], runtime: Runtime) -> Callable[..., None]:
    """Refuse a checkpoint whose optimizer has another number of parts: one, and a second if experts are shared.

    Raises:
        ValueError: the numbers differ.
    """

    def load_state_dict(optimizer: ChainedOptimizer, state: list[dict[str, object]]) -> None:
        # Parts are numbered. A part's own entries have names, which a sharded checkpoint puts next to the numbers.
        num_saved = len(state) if isinstance(state, list) else sum(isinstance(key, int) for key in state) or 1
        num_parts = len(optimizer.chained_optimizers)
        if num_saved != num_parts:
            raise ValueError(
                f"--load: the checkpoint holds an optimizer of {num_saved} parts and this run has one of {num_parts}, "
                "because only one of them has --expert-model-parallel-size above 1: change it back, or add "
                "--no-load-optim"
            )
        original(optimizer, state)

    return load_state_dict


def wrap_set_main_param_and_optimizer_states(original: Callable[..., None], runtime: Runtime) -> Callable[..., None]:
    """Load a parameter and its state except for the step, which the sharded tensors do not contain.

    Gradients are disabled because fp32 sharded parameters are views of the model's parameters.
    """

    def set_all_but_step(
        optimizer: DistributedOptimizer, model_param: torch.Tensor, tensors: dict[str, torch.Tensor]
    ) -> None:
        if not is_over_torch_adam(optimizer):
            original(optimizer, model_param, tensors)
            return
        with torch.no_grad():
            original(optimizer, model_param, {"step": None, **tensors})  # Megatron skips values that are not tensors

    return set_all_but_step


def is_over_torch_adam(part: MegatronOptimizer) -> bool:
    """Return whether a part is a ``DistributedOptimizer`` that updates with torch's Adam."""
    return isinstance(part, DistributedOptimizer) and isinstance(part.optimizer, torch.optim.Adam)


def begin_state(optimizer: torch.optim.Adam) -> None:
    """Create the state that torch would create in the first step: zeros, with a step count of 0."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            }


def add_step(other: torch.optim.Optimizer, empty: torch.optim.Optimizer, state: dict[str, object]) -> dict[str, object]:
    """Return ``state`` of an optimizer without parameters, completed with the step of ``other``."""
    return {**state, "state": {"step": next(iter(other.state.values()))}}


def separate_steps(optimizer: torch.optim.Optimizer) -> None:
    """Give each parameter its own step tensor."""
    for state in optimizer.state.values():
        state["step"] = state["step"].clone()
