"""Loads of experts over whole steps, for the balancing loss of all ranks (``global_aux_loss``).

For T tokens in a step, E experts and scores p_i(x) (Qiu et al. 2025, "Demons in the Detail", equation 3)::

    L = E sum_i f_i P_i        P_i = 1/T sum_x p_i(x) over the step
                               f_i: share of expert i in all choices of the step before; 1/E in the first step

A step's own f_i are complete only after its last forward pass, when most of its backward passes have run. Megatron
therefore takes the micro-batches of the step so far, so that its loss depends on their order. The step before gives all
tokens the same f_i, whatever the micro-batches, slices and ranks. The counts are a buffer of the router, in int64, and
part of checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter

LAST = "last_step_loads"
"""Buffer of the choices of each expert in the step before, on all ranks, int64 [experts]."""
RUNNING = "running_step_loads"
"""Buffer of this rank's choices in the running step, int64 [experts]."""


def add_step_loads(model_chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """``ModelConfig.pre_wrap_hooks``: give routers with the loss of all ranks their buffers."""
    for chunk in model_chunks:
        for router in chunk.modules():
            if isinstance(router, TopKRouter) and router.get_aux_loss_coeff("global_aux_loss"):
                zeros = torch.zeros(router.num_experts, dtype=torch.int64, device=router.weight.device)
                router.register_buffer(LAST, zeros)
                router.register_buffer(RUNNING, zeros.clone(), persistent=False)
    return model_chunks


def shares_of_last_step(router: torch.nn.Module) -> torch.Tensor:
    """Return f_i, float32 [experts]."""
    counts: torch.Tensor = getattr(router, LAST)
    total = counts.sum()
    return torch.where(total > 0, counts / total.clamp(min=1), 1 / len(counts)).float()


def count_choices(router: torch.nn.Module, chosen: torch.Tensor) -> None:
    """Count the choices of a pass. ``chosen``: [tokens, experts], False in padding."""
    running: torch.Tensor = getattr(router, RUNNING)
    running += chosen.sum(0)


def sum_step_loads(original: Callable[..., object]) -> Callable[..., object]:
    """Wrap ``finalize_model_grads_func``: store the counts of the running step for the next step.

    Collective on all processes of a stage: one all-reduce of int64 [routers, experts].
    """

    def finalize_model_grads(model: list[torch.nn.Module], *args: object, **kwargs: object) -> object:
        routers = [router for chunk in model for router in chunk.modules() if hasattr(router, RUNNING)]
        if routers:
            counts = torch.stack([getattr(router, RUNNING) for router in routers])
            dist.all_reduce(counts, group=parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True))
            for router, total in zip(routers, counts, strict=True):
                getattr(router, LAST).copy_(total)
                getattr(router, RUNNING).zero_()
        return original(model, *args, **kwargs)

    return finalize_model_grads
