"""Activation policies in training: put into Megatron's model configuration, and the plan set for each micro-batch."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.training.models.gpt import GPTModelConfig, default_layer_spec
from megatron.training.utils import print_rank_last

from bytescale_ext.activation.arena import allocate_arena
from bytescale_ext.activation.link import make_link
from bytescale_ext.activation.store import ActivationStore
from bytescale_ext.metrics import activations_text
from bytescale_ext.plan.activation import LayerLoad
from bytescale_ext.plan.activation_forecast import forecast
from megatron.bytescale.core.models.gpt.chunked_loss import use_chunked_loss
from megatron.bytescale.core.transformer.transformer_layer import planned_layer_spec
from megatron.bytescale.runtime import HdpRuntime
from megatron.bytescale.training.activation_memory import PlannedMemory
from megatron.bytescale.training.activations import ActivationConfig


def apply(
    args: argparse.Namespace,
    config: ActivationConfig | None,
    model: GPTModelConfig,
    forward_step: Callable[..., Any],
    runtime: HdpRuntime | None,
) -> Callable[..., Any]:
    """Put policy and chunked loss into Megatron's model configuration; returns the forward step to train with.

    Call it after everything else has been put in: layers are wrapped whatever they hold. ``runtime``: of hybrid data
    parallelism, which logs the figures of a step; without it they have a log line of their own.
    """
    if args.chunked_cross_entropy is not None:
        model.pre_wrap_hooks.append(partial(use_chunked_loss, args.chunked_cross_entropy))
    if config is None:
        return forward_step
    store = make_store(args, config)
    made = model.transformer_layer_spec or default_layer_spec

    def layer_spec(settings: GPTModelConfig, vp_stage: int | None = None) -> Any:
        spec: Any = made(settings, vp_stage) if callable(made) and not hasattr(made, "submodules") else made
        return planned_layer_spec(spec, store)

    model.transformer_layer_spec = layer_spec
    memory = None
    if config.memory is not None:
        memory = PlannedMemory(config.memory, store, args.distributed_backend == "nccl", says=args.rank == 0)
    figures = None
    if runtime is None:
        figures = StepLog(store, args.log_interval)
    else:
        runtime.activations = store
    finalize = model.transformer.finalize_model_grads_func or finalize_model_grads
    model.transformer.finalize_model_grads_func = with_check(finalize, store, memory, figures)
    if args.rank == 0:
        print(described(config), flush=True)
    return planned_forward_step(config, store, forward_step, runtime is not None, memory)


def make_store(args: argparse.Namespace, config: ActivationConfig) -> ActivationStore:
    """The store of this process, with its arena."""
    on_cuda = args.distributed_backend == "nccl"
    if on_cuda:
        torch.cuda.set_device(args.local_rank)
    arena = allocate_arena(int(config.machine.host_bytes), pinned=on_cuda)
    return ActivationStore(config.plan(config.largest), make_link(arena, on_cuda), args.num_layers)


def described(config: ActivationConfig) -> str:
    """The plan of the largest micro-batch and its prediction, in one line."""
    if config.offload is not None:
        return config.offload.described()
    load = config.largest
    plan = config.plan(load)
    predicted = forecast(plan, load, config.machine)
    return (
        f"> bytescale: activations {plan.policy}: swapped {plan.swap:.3f}, kept {plan.keep:.3f}, recomputed "
        f"{plan.recompute:.3f}, layer inputs and attention outputs swapped {plan.input_swap:.3f}; predicted for "
        f"{load.num_tokens} tokens: layers {predicted.step_seconds * 1e3:.4g} ms, device "
        f"{predicted.device_bytes / 1e9:.4g} GB, host {predicted.host_bytes / 1e9:.4g} GB"
    )


def with_check(
    finalize: Callable[..., Any],
    store: ActivationStore,
    memory: PlannedMemory | None = None,
    figures: Callable[[], None] | None = None,
) -> Callable[..., Any]:
    """``finalize_model_grads_func``: all backward passes have run, so nothing may be left in the store."""

    warned = False

    def finalize_and_check(*args: Any, **kwargs: Any) -> Any:
        nonlocal warned
        store.check_empty()
        overflowed = store.counts.overflowed_bytes
        if overflowed and not warned:
            warned = True
            warnings.warn(
                f"the host arena of {store.link.arena.num_bytes / 1e9:.4g} GB is full: {overflowed / 1e6:.4g} MB of a "
                "step that were to be swapped stayed on the device; raise --host-memory-gb",
                stacklevel=2,
            )
        if memory is not None:
            memory.end()
        if figures is not None:
            figures()
        return finalize(*args, **kwargs)

    return finalize_and_check


@dataclass
class StepLog:
    """Once a step: every ``interval`` steps say what the last rank kept, swapped and recomputed in this one."""

    store: ActivationStore
    interval: int
    num_steps: int = 0

    def __call__(self) -> None:
        """A step has run."""
        counts = self.store.take_counts()
        self.num_steps += 1
        if self.num_steps % self.interval == 0:
            parts = (counts.kept_bytes, counts.swapped_bytes, counts.recomputed_bytes, self.store.link.arena.peak_bytes)
            print_rank_last(f" {activations_text(*(part / 1e6 for part in parts))}")


def planned_forward_step(
    config: ActivationConfig,
    store: ActivationStore,
    forward_step: Callable[..., Any],
    is_hdp: bool,
    memory: PlannedMemory | None = None,
) -> Callable[..., Any]:
    """The forward step, with the plan of its micro-batch set before the model runs."""
    plan_of = lru_cache(maxsize=4096)(config.plan)

    def forward(data_iterator: Any, model: Any) -> Any:
        if memory is not None and model.training:
            memory.begin(model)
        if not is_hdp:
            return forward_step(data_iterator, model)
        item = next(data_iterator)
        store.plan = plan_of(*load_of_micro_batch(config, item[1]))
        return forward_step(iter((item,)), model)

    return forward


def load_of_micro_batch(config: ActivationConfig, packed: Any) -> tuple[LayerLoad, float]:
    """(load, share of the HDP plan) of a packed micro-batch; each of its shards by the length of its sequence."""
    shards, cost = packed.micro_batch.shards, config.cost
    seconds = [
        sum(direction.shard_cost(shard, _length(shard)) for shard in shards) + direction.g
        for direction in (cost.forward, cost.backward)
    ]
    return config.load(max(1, packed.num_rows), *seconds), packed.micro_batch.offload


def _length(shard: Any) -> int:
    """Tokens of a shard's sequence: shares of a ring differ by a token at most."""
    return int(shard.num_tokens * len(shard.ring))
