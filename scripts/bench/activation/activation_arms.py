"""The arms of ``gpu_activations.py``: our activation plans, and the methods of Megatron and torch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from bytescale_ext.measure.cost_file import read_cost
from bytescale_ext.measure.host_memory import free_host_bytes
from bytescale_ext.plan.activation.forecast import forecast
from bytescale_ext.plan.activation.load import (
    RESIDENT_LAYERS,
    LayerLoad,
    LayerSettings,
    Machine,
    cost_of_rates,
    layer_load,
)
from bytescale_ext.plan.activation.plan import ActivationPlan
from bytescale_ext.plan.activation.policies import make_plan
from bytescale_ext.plan.cost.model_shape import ModelShape
from bytescale_ext.plan.memory.model_states import num_parameters
from megatron.bytescale.training.one_device import OneDeviceModel, end_fine_grained_step
from scripts.bench.activation.models import LOSS_TOKENS
from scripts.bench.activation.offloaded_inputs import OffloadedInputs

ALPHAS = tuple(tenths / 10 for tenths in range(1, 11))
TINY_ALPHAS = (0.5, 1.0)
ENGINE_METHOD = "engine"
MAIN_ARMS = (
    "none", "full recompute", "full recompute, inputs on host", "keep attention output", "memo", "priced",
)  # fmt: skip
"""Arms of a run without ``--all`` and ``--arms``."""

WARM_UP, STALL_STEPS, LAYER_REPEATS = 1, 1, 3
START_SECONDS = 45.0
"""Seconds until the first step: imports, the model, and page-locked memory."""

REPEATED = {
    "full": 1.0, "full, inputs on host": 1.0, "core_attn": 1.0, "mlp": 0.5,
}  # fmt: skip
"""Upper bound of the forward passes of a layer that a method of Megatron repeats."""

PAGEABLE_BYTES_PER_SECOND = 20e9
"""Speed of copies into host memory that torch allocates and waits for."""
RATES = (650e12, 600e12, 500e12)
"""Predicted FLOP/s of linear layers, attention forward and attention backward."""


@dataclass(frozen=True)
class Settings:
    """The settings of one run of the bench."""

    shape: ModelShape
    lengths: tuple[int, ...]
    on_cuda: bool
    host_gb: tuple[float, ...]
    device_gb: float
    link_gb_per_second: float
    num_steps: int
    cost_file: Path | None
    peak_flops: float
    engine: bool = False
    is_tiny: bool = False
    arms: tuple[str, ...] = ()
    with_sweep: bool = True

    @property
    def states_gb(self) -> float:
        """GB of parameters and gradients, which have one type; there is no optimizer."""
        return 2 * (2 if self.on_cuda else 4) * num_parameters(self.shape) / 1e9


@dataclass(frozen=True)
class Arm:
    """One way to handle activations: one of our plans, or a method of Megatron or torch.

    Attributes:
        name: name in tables.
        plan: activation plan of our layers.
        method: method of Megatron or torch, or "".
        kept_whole: number of last layers that full recompute leaves alone.
    """

    name: str
    plan: ActivationPlan
    method: str = ""
    kept_whole: int = 0

    def whole_layers(self, num_layers: int) -> int:
        """Return the number of layers that keep all their tensors. Only arms with the same number are compared."""
        if self.method:
            return self.kept_whole
        return num_layers if self.plan.is_off else self.plan.resident_layers


def load_of(settings: Settings, length: int) -> LayerLoad:
    """Return the load of a layer on ``length`` tokens."""
    if settings.cost_file is None:
        cost = cost_of_rates(settings.shape, *RATES)
    else:
        measured = read_cost(settings.cost_file)
        cost = replace(measured, shape=replace(measured.shape, num_layers=settings.shape.num_layers))
    return layer_load(cost, length, LayerSettings(loss_tokens=LOSS_TOKENS, element_bytes=2 if settings.on_cuda else 4))


def recomputing_arms(kept_whole: int, suffix: str = "") -> list[Arm]:
    """Return full recompute with and without attention, on all layers except the last ``kept_whole``."""
    return [
        Arm(f"full recompute{suffix}", ActivationPlan("none"), "full", kept_whole),
        Arm(f"keep attention output{suffix}", ActivationPlan("shares", 0.0, 1.0, 0.0, False, kept_whole)),
    ]


def arms_of(settings: Settings, length: int, host_gb: float, kept_whole: int | None = None) -> list[Arm]:
    """Return all arms of a length, except policies that do not fit their budgets.

    Recomputing arms keep ``kept_whole`` layers whole; by default as many as ``priced`` keeps, or as MEMO keeps if
    ``priced`` keeps all. If no arms were named, there is also a recomputing arm for each other number of ``priced``.
    """
    off, load = ActivationPlan("none"), load_of(settings, length)
    machine = Machine(settings.device_gb * 1e9, host_gb * 1e9, settings.link_gb_per_second * 1e9)
    zero = Arm("alpha 0", ActivationPlan("memo", 0.0, 1.0, 1.0, False, RESIDENT_LAYERS))
    tight = replace(machine, device_bytes=forecast(zero.plan, load, machine).device_bytes)
    ours = []
    for name, policy, memory in (
        ("memo", "memo", machine), ("priced", "priced", machine), ("priced, no memory to spare", "priced", tight),
    ):  # fmt: skip
        with contextlib.suppress(ValueError):
            ours.append(Arm(name, make_plan(policy, load, memory)))
    numbers = [arm.whole_layers(load.num_layers) for arm in ours if arm.name.startswith("priced")]
    numbers = [number for number in numbers if number < load.num_layers]
    if kept_whole is None:
        kept_whole = numbers[0] if numbers else RESIDENT_LAYERS
    arms = [
        Arm("none", off),
        *recomputing_arms(kept_whole),
        Arm("full recompute, inputs on host", off, "full, inputs on host", kept_whole),
        Arm("recompute attention", off, "core_attn"),
        Arm("recompute MLP", off, "mlp"),
        Arm("save_on_cpu", off, "save_on_cpu"),
        zero,
        *ours,
    ]
    for number in sorted({RESIDENT_LAYERS, *numbers} - {kept_whole}):
        arms += [] if settings.arms else recomputing_arms(number, f", {number} layers whole")
    if settings.with_sweep:
        alphas = TINY_ALPHAS if settings.is_tiny else ALPHAS
        plans = [ActivationPlan("memo", alpha, 1 - alpha, 1.0, False, RESIDENT_LAYERS) for alpha in alphas]
        arms += [Arm(f"alpha {plan.swap:g}", plan) for plan in plans]
    return arms


def predicted_seconds(settings: Settings) -> float:
    """Return the predicted seconds of a run of all its arms, without the sweep and the search for the longest."""
    steps = settings.num_steps + WARM_UP + STALL_STEPS
    total = START_SECONDS
    for length in settings.lengths:
        load = load_of(settings, length)
        total += (LAYER_REPEATS + 1) * (2 * load.forward_seconds + load.backward_seconds)
        arms = [arm for host_gb in settings.host_gb for arm in arms_of(settings, length, host_gb)]
        total += steps * sum(_step_seconds(arm, load, settings.link_gb_per_second) for arm in wanted(arms, settings))
    return total


def wanted(arms: list[Arm], settings: Settings) -> list[Arm]:
    """Return the arms that the command line names, or all if it names none."""
    return [arm for arm in arms if not settings.arms or arm.name in settings.arms]


def _step_seconds(arm: Arm, load: LayerLoad, link_gb_per_second: float) -> float:
    """Return the predicted seconds of a step of one arm, without the loss."""
    seconds = forecast(arm.plan, load, Machine(1e18, 1e18, link_gb_per_second * 1e9)).step_seconds
    seconds += REPEATED.get(arm.method, 0.0) * load.num_layers * load.forward_seconds
    if arm.method == "save_on_cpu":
        seconds = max(seconds, 2 * load.num_layers * load.bytes_of() / PAGEABLE_BYTES_PER_SECOND)
    return seconds


@contextlib.contextmanager
def with_method(built: OneDeviceModel, arm: Arm) -> Iterator[None]:
    """Switch an arm's method of Megatron or torch on, and off again."""
    method = arm.method
    if method == ENGINE_METHOD:  # build_model has switched it on
        try:
            yield
        finally:
            end_fine_grained_step()
        return
    config, layers = built.model.decoder.config, built.model.decoder.layers
    try:
        if method.startswith("full"):
            config.recompute_granularity, config.recompute_method = "full", "block"  # the first layers
            config.recompute_num_layers = len(layers) - arm.kept_whole
        for layer in layers:
            layer.recompute_mlp = method == "mlp"
            layer.self_attention.checkpoint_core_attention = method == "core_attn"
        with contextlib.ExitStack() as stack:
            if method == "save_on_cpu":
                stack.enter_context(torch.autograd.graph.save_on_cpu(pin_memory=built.device.type == "cuda"))
            if method.endswith("inputs on host"):
                inputs = OffloadedInputs(built.store.link, len(layers) - arm.kept_whole)
                stack.enter_context(inputs.during(built.model.decoder))
            yield
    finally:
        config.recompute_granularity = config.recompute_method = config.recompute_num_layers = None
        for layer in layers:
            layer.recompute_mlp = layer.self_attention.checkpoint_core_attention = False


def lacks_host_memory(arm: Arm, length: int, settings: Settings) -> str | None:
    """Return the lack of host memory as text, for an arm that pins memory itself; None if there is enough.

    Torch rounds each block up to a power of two. The system kills a process that takes too much, with all its arms.
    """
    if arm.method != "save_on_cpu":
        return None
    needed = 2 * settings.shape.num_layers * load_of(settings, length).bytes_of() / 1e9
    free = free_host_bytes() / 1e9
    return f"may need {needed:.0f} GB of host memory; {free:.0f} GB are free" if needed > free else None
