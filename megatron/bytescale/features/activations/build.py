"""Activation policies in training: they wrap Megatron's layers and set a plan before each micro-batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.training.utils import print_rank_0, print_rank_last

from bytescale_ext.activation.arena import allocate_arena
from bytescale_ext.activation.link import make_link
from bytescale_ext.activation.store import ActivationStore
from bytescale_ext.attention.kernels.table import choose_kernel
from bytescale_ext.config.hdp import HdpConfig
from bytescale_ext.config.memory.activations import ActivationConfig
from bytescale_ext.config.run import RunConfig
from bytescale_ext.config.slices import SliceConfig
from bytescale_ext.measure.metrics import activations_text
from bytescale_ext.plan.activation.load import LayerLoad
from bytescale_ext.plan.activation.plan import ActivationPlan
from bytescale_ext.plan.schedule.actions import Action, seq1f1b_schedule
from bytescale_ext.plan.step.sizes import ONE_SLICE, Slicing
from megatron.bytescale.core.models.gpt.gpt_layer_specs import with_sample_attention
from megatron.bytescale.core.transformer.transformer_layer import planned_layer_spec
from megatron.bytescale.runtime import Runtime
from megatron.bytescale.training.pretrain_arguments import Training
from megatron.bytescale.training.speeds import measure_speeds


def plan_activations(training: Training, runtime: Runtime) -> Training:
    """Wrap all layers and set the plan of each micro-batch before its forward pass.

    Hybrid data parallelism logs how much a step kept, swapped and recomputed; without it this function adds a log line.
    """
    run = runtime.run
    config, has_documents = run.get(ActivationConfig), run.find(HdpConfig) is not None
    store = make_store(run)
    runtime.add_parts(activations=store)
    log = None if has_documents else StepLog(store, run.process.log_interval)
    if has_own_attention(run, training.model.transformer.transformer_impl):
        training.wrap_layer_spec(partial(with_sample_attention, runtime=runtime))
        training.model.pre_wrap_hooks.append(partial(prepare_kernel, runtime))
    training.wrap_layer_spec(partial(planned_layer_spec, activations=store)).wrap_finalize(
        partial(with_check, store=store, log=log)
    )
    if config.measures:
        training.model.pre_wrap_hooks.append(partial(measure_speeds, runtime))
    elif run.process.rank == 0:
        print(config.described(), flush=True)
    if has_documents:
        return training.wrap_forward_step(partial(planned_forward_step, runtime, store))
    order = None if run.find(SliceConfig) is not None else partial(order_of_stage, training.model.transformer)
    return training.wrap_forward_step(partial(ordered_forward_step, store, order))


def has_own_attention(run: RunConfig, transformer_impl: str) -> bool:
    """Return whether samples need our attention, because Megatron's local attention keeps all scores of a layer."""
    return run.find(HdpConfig) is None and run.find(SliceConfig) is None and transformer_impl == "local"


def prepare_kernel(runtime: Runtime, model_chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """Hook in ``ModelConfig.pre_wrap_hooks``: choose the attention kernel."""
    shape = runtime.run.shape
    inputs = (runtime.device, runtime.run.process.dtype, shape.head_dim)
    kernel, reason, _ = choose_kernel(*inputs, windows=shape.window is not None, value_dim=shape.value_dim)
    runtime.add_parts(kernel=kernel)
    print_rank_0(f"> bytescale: attention kernel {kernel.name} ({reason})")
    return model_chunks


def make_store(run: RunConfig) -> ActivationStore:
    """Return the activation store of this process, with its host arena."""
    config, process = run.get(ActivationConfig), run.process
    arena = allocate_arena(int(config.host_bytes), pinned=process.on_cuda)
    return ActivationStore(config.plan(config.largest), make_link(arena, process.on_cuda), run.shape.num_layers)


def with_check(
    finalize: Callable[..., Any], store: ActivationStore, log: Callable[[], None] | None = None
) -> Callable[..., Any]:
    """Wrap ``finalize_model_grads_func`` with a check that the store is empty, since all backward passes have run."""
    warned = False

    def finalize_and_check(*args: Any, **kwargs: Any) -> Any:
        nonlocal warned
        store.check_empty()
        overflowed = store.counts.overflowed_bytes
        if overflowed and not warned:
            warned = True
            warnings.warn(
                f"the host arena of {store.link.arena.num_bytes / 1e9:.4g} GB is full: {overflowed / 1e6:.4g} MB of a "
                "step stayed on the device instead of being swapped; raise --host-memory-gb",
                stacklevel=2,
            )
        if log is not None:
            log()
        return finalize(*args, **kwargs)

    return finalize_and_check


@dataclass
class StepLog:
    """Prints every ``interval`` steps how much the last rank kept, swapped and recomputed in that step."""

    store: ActivationStore
    interval: int
    num_steps: int = 0

    def __call__(self) -> None:
        """Count a finished step, and print its line if due."""
        counts = self.store.take_counts()
        self.num_steps += 1
        if self.num_steps % self.interval == 0:
            parts = (counts.kept_bytes, counts.swapped_bytes, counts.recomputed_bytes, self.store.link.arena.peak_bytes)
            print_rank_last(f" {activations_text(*(part / 1e6 for part in parts))}")


def planned_forward_step(
    runtime: Runtime, store: ActivationStore, forward_step: Callable[..., Any]
) -> Callable[..., Any]:
    """Wrap the forward step of documents: set the plan of its micro-batch before the model runs."""

    @cache
    def planner(slicing: Slicing) -> tuple[ActivationConfig, Callable[..., ActivationPlan]]:
        config = runtime.run.get(ActivationConfig).in_slices(slicing)  # by now it has measured speeds
        return config, lru_cache(maxsize=4096)(config.plan)

    def forward(data_iterator: Any, model: Any) -> Any:
        config, plan_of = planner(runtime.slicing)
        item = next(data_iterator)
        store.plan = plan_of(*load_of_micro_batch(config, item[1]))
        if model.training:
            store.begin_forward()
        return forward_step(iter((item,)), model)

    return forward


def ordered_forward_step(
    store: ActivationStore, order: Callable[[], tuple[Action, ...] | None] | None, forward_step: Callable[..., Any]
) -> Callable[..., Any]:
    """Wrap the forward step of samples: follow the stage's order of work.

    ``order`` returns the order of a step, or None if a schedule of slices already starts the step with its order.
    """

    def forward(data_iterator: Any, model: Any) -> Any:
        if model.training:
            actions = order() if order is not None and store.order is None else None
            if actions is not None:
                store.begin_step(actions)
            store.begin_forward()
        return forward_step(data_iterator, model)

    return forward


def order_of_stage(config: Any) -> tuple[Action, ...] | None:
    """Return the order of a step of Megatron's own schedule on this stage; None without a pipeline."""
    num_stages = parallel_state.get_pipeline_model_parallel_world_size()
    if num_stages == 1:
        return None
    chunks = parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1
    schedule = seq1f1b_schedule(
        num_stages, get_num_microbatches(), ONE_SLICE, chunks, config.microbatch_group_size_per_vp_stage
    )
    return schedule.stages[parallel_state.get_pipeline_model_parallel_rank()]


def load_of_micro_batch(config: ActivationConfig, packed: Any) -> tuple[LayerLoad, float]:
    """Return (load, share that the HDP plan offloads) of a packed micro-batch."""
    shards, cost = packed.micro_batch.shards, config.cost
    seconds = [
        sum(direction.shard_cost(shard, _length(shard)) for shard in shards) + direction.g
        for direction in (cost.forward, cost.backward)
    ]
    return config.load(max(1, packed.num_rows), *seconds), packed.micro_batch.offload


def _length(shard: Any) -> int:
    """Return the tokens of a shard's sequence on this rank; the shares of a ring differ by at most one token."""
    return int(shard.num_tokens * len(shard.ring))
