"""Measures at start the speeds that activation policies need, on all ranks together.

``--hdp-learn-costs off`` turns it off.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.training.utils import print_rank_0

from bytescale_ext.attention.kernels.table import Kernel, choose_kernel
from bytescale_ext.config.memory.activations import ActivationConfig
from bytescale_ext.measure.ring_speed import collective_seconds_per_byte
from bytescale_ext.measure.speeds import (
    BUDGET_SECONDS,
    Rates,
    Timer,
    copy_seconds_per_byte,
    kind_seconds,
    measured_lengths,
    rates_of,
)
from bytescale_ext.plan.activation.load import cost_of_rates
from bytescale_ext.plan.cost.model_cost import ModelCost
from megatron.bytescale.runtime import Runtime

SMALLEST_COPY = 1 << 20
"""Smallest arena that is measured, in bytes: below it, starting a copy takes longer than the copy."""


def measure_speeds(
    runtime: Runtime, model_chunks: list[torch.nn.Module], clock: Callable[[], float] = time.perf_counter
) -> list[torch.nn.Module]:
    """Hook in ``ModelConfig.pre_wrap_hooks``: measure speeds and plan with the slowest rank's. Collective.

    If the micro-batches of any rank do not fit with the measured speeds, all ranks keep the assumed speeds. Random
    states, gradients and the model do not change.
    """
    config, on_cuda = runtime.run.get(ActivationConfig), runtime.run.process.on_cuda
    dist.barrier()  # ranks share links, so they measure at the same time
    timer = Timer(clock, torch.cuda.synchronize if on_cuda else lambda: None)
    link, rates, collective = agreed_speeds(runtime, config, timer)
    cost = config.cost if rates is None else cost_at(runtime, rates, collective)
    measured, problem = config, ""
    try:
        measured = config.with_speeds(cost, link or config.decision.setup.budget.link_bytes_per_second)
    except ValueError as error:
        problem = str(error)
    if _any_rank(bool(problem), runtime.device):
        measured = replace(config, measures=())
        print_rank_0(
            f"> bytescale: measured speeds are not used, because they do not fit: {problem or 'on other ranks'}"
        )
    else:
        seconds = f"{timer.elapsed:.1f} s, of at most about {BUDGET_SECONDS:g}"
        print_rank_0(f"> bytescale: measured at start in {seconds}: {described(link, rates, collective)}")
    runtime.run = runtime.run.with_feature("activations", measured)
    assert runtime.parts.activations is not None, "measured for an activation policy"
    runtime.parts.activations.plan = measured.plan(measured.largest)
    print_rank_0(measured.described())
    return model_chunks


def agreed_speeds(runtime: Runtime, config: ActivationConfig, timer: Timer) -> tuple[float, Rates | None, float]:
    """Return the link's bytes per second, the rates, and the collectives' seconds per byte; 0 or None if not measured.

    Collective: all ranks get the slowest rank's speeds.
    """
    run, device = runtime.run, runtime.device
    shape, ranks = run.shape, run.process.tensor_parallel
    assert runtime.parts.activations is not None, "measured for an activation policy"
    arena = runtime.parts.activations.link.arena.memory
    lengths = measured_lengths(shape, ranks, run.process.on_cuda)
    seconds: list[float] = []
    copies = "link" in config.measures and config.machine.host_bytes >= SMALLEST_COPY
    if copies:  # an arena that was not allocated in full cannot be measured
        is_there = arena.numel() >= SMALLEST_COPY
        seconds.append(copy_seconds_per_byte(arena, device, timer) if is_there else 0.0)
    if "layers" in config.measures:
        kernel, like = _kernel_of(runtime), torch.empty(0, dtype=run.process.dtype, device=device)
        for length in lengths:
            seconds += kind_seconds(shape, ranks, kernel, like, length, timer)
    agreed = torch.tensor(seconds, dtype=torch.float64, device=device)
    if seconds:
        dist.all_reduce(agreed, dist.ReduceOp.MAX)
    times = agreed.tolist()
    per_byte = times.pop(0) if copies else 0.0
    if run.process.on_cuda:
        torch.cuda.empty_cache()
    if "layers" not in config.measures:
        return (1.0 / per_byte if per_byte else 0.0), None, 0.0
    collective = 0.0
    if ranks > 1:
        collective = collective_seconds_per_byte(parallel_state.get_tensor_model_parallel_group(), device)
    rates = rates_of(shape, ranks, lengths, (times[: len(times) // 2], times[len(times) // 2 :]))
    return (1.0 / per_byte if per_byte else 0.0), rates, collective


def cost_at(runtime: Runtime, rates: Rates, collective: float) -> ModelCost:
    """Return the model's cost at measured rates."""
    run = runtime.run
    cost = cost_of_rates(
        run.shape,
        rates.products,
        rates.attention_forward,
        rates.attention_backward,
        run.process.tensor_parallel,
        collective=collective or None,
    )
    return replace(cost, device="this device", source="measured at start")


def described(link: float, rates: Rates | None, collective: float) -> str:
    """Return the measured speeds as text."""
    parts = [f"{link / 1e9:.4g} GB/s to host memory"] * (link > 0)
    if rates is not None:
        products, forward, backward = (
            rate / 1e12 for rate in (rates.products, rates.attention_forward, rates.attention_backward)
        )
        parts.append(
            f"{products:.4g} TFLOP/s in matrix products, {forward:.4g} and {backward:.4g} in attention forward and "
            "backward"
        )
    if collective:
        parts.append(f"{1e-9 / collective:.4g} GB/s between tensor-parallel ranks")
    return ", ".join(parts) or "nothing"


def _kernel_of(runtime: Runtime) -> Kernel:
    """Return the run's kernel, or the best kernel if another library computes attention."""
    if runtime.parts.kernel is not None:
        return runtime.parts.kernel
    return choose_kernel(runtime.device, runtime.run.process.dtype, runtime.run.shape.head_dim)[0]


def _any_rank(is_so: bool, device: torch.device) -> bool:
    """Return whether ``is_so`` holds on any rank. Collective."""
    flag = torch.tensor(float(is_so), device=device)
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return not math.isclose(float(flag), 0.0)
