from __future__ import annotations

import torch

from megatron.bytescale.core.tensor_parallel.random import wrap_get_cuda_rng_state, wrap_set_cuda_rng_state


def never(*args: object, **kwargs: object) -> None:
    raise AssertionError("CUDA's generator was asked")


def test_random_state_is_that_of_the_cpu() -> None:
    get_state, set_state = wrap_get_cuda_rng_state(never, None), wrap_set_cuda_rng_state(never, None)
    before = torch.get_rng_state()
    try:
        state = get_state(device="cuda", clone=True, graph_safe=True)
        assert torch.equal(state, before)
        first = torch.rand(3)
        set_state(state, device=-1, graph_safe=True)
        assert torch.equal(torch.rand(3), first)
    finally:
        torch.set_rng_state(before)
