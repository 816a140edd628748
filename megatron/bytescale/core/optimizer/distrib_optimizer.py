"""Saving and loading an optimizer: one over torch's own Adam (neither TransformerEngine nor Apex) is made able to, and
one that keeps its state otherwise than the checkpoint says so.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import HAVE_APEX_OR_TE, DistributedOptimizer


def wrap_get_megatron_optimizer(original: Callable[..., Any], runtime: Any) -> Callable[..., Any]:
    """Build Megatron's optimizer, and prepare it, and each ``DistributedOptimizer`` over torch's Adam, for checkpoints.

    Such an optimizer cannot load one otherwise: Megatron asks it for its step before torch has made any state, looks
    for the step among the tensors that are sharded, copies into parameters that require gradients (``--ckpt-format
    torch``), and lets all parameters share one step tensor, which each of them would count up. Nor can it save one
    where it has no parameters, as that of the experts on a pipeline stage without any: Megatron finds no step there.
    """

    def get_megatron_optimizer(*args: Any, **kwargs: Any) -> Any:
        optimizer = original(*args, **kwargs)
        parts = getattr(optimizer, "chained_optimizers", [optimizer])
        optimizer.load_state_dict = partial(load_as_many_parts, optimizer.load_state_dict, len(parts))
        for one in parts:
            inner = getattr(one, "optimizer", None)
            if isinstance(one, DistributedOptimizer) and isinstance(inner, torch.optim.Adam) and not HAVE_APEX_OR_TE:
                begin_state(inner)
                inner.register_load_state_dict_post_hook(separate_steps)
                one._set_main_param_and_optimizer_states = partial(  # type: ignore[method-assign]
                    set_all_but_step, one._set_main_param_and_optimizer_states
                )
                if not inner.state and one is not parts[0]:
                    one.state_dict = partial(  # type: ignore[method-assign]
                        state_dict_with_step, one.state_dict, inner, parts[0].optimizer
                    )
        return optimizer

    return get_megatron_optimizer


def load_as_many_parts(original: Callable[[Any], None], num_parts: int, state: Any) -> None:
    """Megatron's ``load_state_dict`` of an optimizer of so many parts: one, and one more for experts that are shared.

    Raises:
        ValueError: the checkpoint has another number of parts.
    """
    # Parts are numbered; a part's own entries have names, which a sharded checkpoint mixes with what was saved.
    num_saved = len(state) if isinstance(state, list) else sum(isinstance(key, int) for key in state) or 1
    if num_saved != num_parts:
        raise ValueError(
            f"--load: the checkpoint holds an optimizer of {num_saved} parts and this run has one of {num_parts}, as "
            "only one of them has --expert-model-parallel-size above 1: stay on that side of it, or add "
            "--no-load-optim"
        )
    original(state)


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


def state_dict_with_step(original: Callable[[], Any], empty: torch.optim.Adam, other: torch.optim.Adam) -> Any:
    """``DistributedOptimizer.state_dict`` over ``empty``, which has no parameters: its step is that of ``other``."""
    empty.state["step"] = next(iter(other.state.values()))  # type: ignore[index]
    try:
        return original()
    finally:
        empty.state.clear()


def separate_steps(optimizer: torch.optim.Optimizer) -> None:
    """Give each parameter a step tensor of its own."""
    for state in optimizer.state.values():
        state["step"] = state["step"].clone()
