"""Measures at the start of training the costs for placing experts (``--moe-placement-speeds``: off)."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.func import functional_call

from bytescale_ext.measure.expert_speed import ExpertSize, agreed_cost, link_seconds, timed_token_counts, token_seconds
from bytescale_ext.measure.speeds import Timer
from bytescale_ext.plan.experts.cost import ExpertCost
from megatron.bytescale.core.transformer.moe.slot_experts import SlotExperts
from megatron.bytescale.runtime import Runtime

SECONDS = 1.0
"""Time in seconds after which no product is repeated."""


def measured_placement_cost(
    runtime: Runtime, model_chunks: list[torch.nn.Module], clock: Callable[[], float] = time.perf_counter
) -> tuple[ExpertCost, str]:
    """Return the cost of one micro-batch on the slowest rank, and its source as text. Collective over all processes.

    It runs this rank's first expert with synthetic weights and tokens, so the model, gradients and random states do not
    change. Stages without experts only wait.
    """
    device, on_cuda = runtime.device, runtime.run.process.on_cuda
    modules = (module for chunk in model_chunks for module in chunk.modules())
    experts = next((module for module in modules if isinstance(module, SlotExperts)), None)
    group = parallel_state.get_expert_model_parallel_group()
    dist.barrier()  # ranks share links and processors, so they measure at the same time
    timer = Timer(clock, torch.cuda.synchronize if on_cuda else lambda: None, SECONDS)
    seconds, text = (0.0, 0.0, 0.0), ""
    if experts is not None:
        expert: torch.nn.Module = experts.local_experts[0]
        first, *_ = parameters = list(expert.parameters())
        width = experts.config.moe_latent_size or experts.config.hidden_size
        size = ExpertSize(sum(weight.numel() for weight in parameters), width, first.element_size())
        counts = timed_token_counts(size.weights, on_cuda)
        of_token = token_seconds(computing(expert, size.width, device), counts, timer)
        seconds = (of_token, *link_seconds(size, group, device))
    cost = agreed_cost(seconds, device)
    if on_cuda:
        torch.cuda.empty_cache()
    if experts is not None:
        text = f"measured at start in {timer.elapsed:.1f} s: {size.described(cost)}"
    return cost, text


def computing(expert: torch.nn.Module, width: int, device: torch.device) -> Callable[[int], object]:
    """Return a function that runs an expert forward and backward on a number of tokens, with separate weights.

    ``width``: width of a token.
    """
    weights = {
        name: torch.full_like(parameter, 1e-2, device=device, requires_grad=True)
        for name, parameter in expert.named_parameters()
    }
    like = next(iter(weights.values()))

    def compute(num_tokens: int) -> object:
        with torch.enable_grad():
            tokens = like.new_ones((num_tokens, width), requires_grad=True)
            output = functional_call(expert, weights, (tokens, tokens.new_ones(num_tokens, dtype=torch.float32)))[0]
            return torch.autograd.grad(output, [tokens, *weights.values()], torch.ones_like(output))

    return compute
