"""Random states on CPU, for the two functions with which Megatron's tracker accesses CUDA's generators."""

from __future__ import annotations

from collections.abc import Callable

import torch

Function = Callable[..., object]


def wrap_get_cuda_rng_state(original: Function, runtime: object) -> Function:
    """Read the state of the CPU's generator instead."""

    def get_rng_state(device: object = "cuda", clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
        return torch.get_rng_state()

    return get_rng_state


def wrap_set_cuda_rng_state(original: Function, runtime: object) -> Function:
    """Set the state of the CPU's generator instead."""

    def set_rng_state(new_state: torch.Tensor, device: object = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(new_state)

    return set_rng_state
