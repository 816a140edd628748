"""The distributed optimizer over torch's own Adam (neither TransformerEngine nor Apex), made to load checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import HAVE_APEX_OR_TE, DistributedOptimizer


def wrap_get_megatron_optimizer(original: Callable[..., Any], runtime: Any) -> Callable[..., Any]:
    """Build Megatron's optimizer, and prepare each ``DistributedOptimizer`` over torch's Adam for loading.

    Such an optimizer cannot load a checkpoint otherwise: Megatron asks it for its step before torch has made any
    state, looks for the step among the tensors that are sharded, copies into parameters that require gradients
    (``--ckpt-format torch``), and lets all parameters share one step tensor, which each of them would count up.
    """

    def get_megatron_optimizer(*args: Any, **kwargs: Any) -> Any:
        optimizer = original(*args, **kwargs)
        for one in getattr(optimizer, "chained_optimizers", [optimizer]):
            inner = getattr(one, "optimizer", None)
            if isinstance(one, DistributedOptimizer) and isinstance(inner, torch.optim.Adam) and not HAVE_APEX_OR_TE:
                begin_state(inner)
                inner.register_load_state_dict_post_hook(separate_steps)
                one._set_main_param_and_optimizer_states = partial(  # type: ignore[method-assign]
                    set_all_but_step, one._set_main_param_and_optimizer_states
                )
        return optimizer

    return get_megatron_optimizer


@torch.no_grad()  # in fp32 the sharded parameters are views of the model's
def set_all_but_step(original: Callable[..., None], model_param: torch.Tensor, tensors: dict[str, Any]) -> None:
    """``DistributedOptimizer._set_main_param_and_optimizer_states``, which skips what is not a tensor."""
    original(model_param, {"step": None, **tensors})


def begin_state(optimizer: torch.optim.Adam) -> None:
    """Make now the state that torch makes in the first step: zeros, after 0 steps."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            }


def separate_steps(optimizer: torch.optim.Optimizer) -> None:
    """Give each parameter a step tensor of its own."""
    for state in optimizer.state.values():
        state["step"] = state["step"].clone()
