"""Runs a planned step with Megatron's own schedules, with and without pipelines.

HDP rank r is pipeline r, and all its stages run the micro-batches of rank r, whole or in slices. On each stage the
rings of a micro-batch run in that stage's dp-cp group. Pipelines may have different numbers of micro-batches. Ranks
never wait for each other in a cycle: a sequence has the same micro-batch index on every rank of its ring, and the order
of indices does not depend on their number (see ``plan.schedule.actions``).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_model_config

from bytescale_ext.attention.slices import MicroBatchPrefix
from bytescale_ext.config.slices import SliceConfig
from bytescale_ext.data.loading.step import StepBatch
from bytescale_ext.data.samples.packed import PackedMicroBatch
from bytescale_ext.data.samples.units import padding_units
from bytescale_ext.measure.metrics import append_jsonl
from bytescale_ext.plan.schedule.actions import SliceSchedule, seq1f1b_schedule
from bytescale_ext.plan.schedule.check import checked_schedule
from bytescale_ext.plan.step.placed import micro_batch_counts
from megatron.bytescale.core.distributed.ordered_reductions import begin_reductions
from megatron.bytescale.core.pipeline_parallel.agreement import agree_on_plan
from megatron.bytescale.core.pipeline_parallel.label_shares import label_shares, weighs_by_labels
from megatron.bytescale.core.pipeline_parallel.p2p_communication import stage_communicator
from megatron.bytescale.core.pipeline_parallel.pairs import weigh_pairs
from megatron.bytescale.core.pipeline_parallel.seq1f1b import DataIterators, SliceStep, run_samples, run_schedule
from megatron.bytescale.learned_costs import learn_costs
from megatron.bytescale.runtime import Runtime

Chunks = list[torch.nn.Module]
"""The model of a process: one chunk, or one chunk for each virtual stage."""


def wrap_get_forward_backward_func[**P](
    original: Callable[P, Callable[..., object]], runtime: Runtime
) -> Callable[P, Callable[..., object]]:
    """Run planned steps of documents, or samples in slices, with the schedule that Megatron chooses."""
    run = run_step if runtime.run.find(SliceConfig) is None else run_samples

    def get_forward_backward_func(*args: P.args, **kwargs: P.kwargs) -> Callable[..., object]:
        return partial(run, runtime, original(*args, **kwargs))

    return get_forward_backward_func


def run_step(
    runtime: Runtime, megatron: Callable[..., object], *, data_iterator: DataIterators, model: Chunks, **options: object
) -> object:
    """Run the next step of the loader with one of Megatron's schedule functions.

    An item of the data iterator is a whole step. With virtual stages each model chunk has an iterator; the first
    iterator gives the step, and all chunks run it.
    """
    del options["num_microbatches"]  # Megatron's number is equal on all ranks; plans differ
    chunks = model if isinstance(model, list) else [model]
    iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
    training = not options.get("forward_only", False)
    begin_step(runtime, iterators[0], training)
    if training and weighs_by_labels(runtime, get_model_config(chunks[0])):
        runtime.step.label_shares = label_shares(runtime)
    if training:
        begin_reductions(runtime, chunks)
    with all_parameters_gathering(chunks, training):
        if runtime.parts.pair_loss is not None:
            run_first_pass(runtime, megatron, chunks, options)
        result = run_units(runtime, megatron, chunks, training, options)
    end_step(runtime, training)
    return result


def run_first_pass(runtime: Runtime, megatron: Callable[..., object], chunks: Chunks, options: dict[str, Any]) -> None:
    """Run the micro-batches of a step of pairs forward only, and give their tokens the weights of the second pass."""
    step, loss = runtime.step.batch, runtime.parts.pair_loss
    assert step is not None, f"{step=}"
    assert loss is not None, f"{loss=}"
    run = partial(run_units, runtime, megatron, chunks, False, {**options, "forward_only": True})
    runtime.step.batch = replace(step, micro_batches=weigh_pairs(loss, step, chunks, run))


def run_units(
    runtime: Runtime, megatron: Callable[..., object], chunks: Chunks, training: bool, options: dict[str, Any]
) -> object:
    """Run the micro-batches of the step, whole or in slices."""
    units, num_slices = units_of_step(runtime, chunks), runtime.slicing.num_slices
    runtime.step.expert_loads = None
    if num_slices == runtime.hdp.num_stages == 1:  # Megatron's own order, without messages
        return megatron(data_iterator=[inputs_of(units)], num_microbatches=len(units), model=chunks, **options)
    config = get_model_config(chunks[0])
    schedule = schedule_of(runtime, chunks, len(units) // num_slices)
    step, stage = None, parallel_state.get_pipeline_model_parallel_rank()
    if num_slices > 1 or schedule.slicing.zero_bubble:
        link = runtime.parts.link if runtime.slicing.swapped_tokens else None
        step = SliceStep(schedule, stage, training, mark=runtime.parts.clock.mark, link=link)
        runtime.step.weight_gradients = step.weight_gradients
        runtime.step.expert_loads = step.expert_loads if num_slices > 1 else None
    if training and runtime.parts.activations is not None:
        runtime.parts.activations.begin_step(schedule.stages[stage])
    shares = parallel_state.get_tensor_model_parallel_world_size() if config.sequence_parallel else 1
    communicator = stage_communicator(
        config,
        schedule,
        lambda action: units[action.micro_batch * num_slices + action.slice_index].num_rows // shares,
        runtime.parts.links if schedule.num_chunks > 1 or schedule.slicing.receives_ahead else None,
        clock=runtime.parts.clock if training else None,
    )
    inputs = [inputs_of(units, step if num_slices > 1 else None) for _ in chunks]
    return run_schedule(megatron, schedule, communicator, step, data_iterator=inputs, model=chunks, **options)


def inputs_of(
    units: tuple[PackedMicroBatch, ...], step: SliceStep | None = None
) -> Iterator[tuple[int, PackedMicroBatch, MicroBatchPrefix | None]]:
    """Yield the inputs of one model chunk: micro-batch index, unit, and for a slice the keys of earlier slices."""
    num_slices = 1 if step is None else step.schedule.num_slices
    for index, unit in enumerate(units):
        yield index // num_slices, unit, None if step is None else step.prefix(unit.layout)


def units_of_step(runtime: Runtime, chunks: Chunks) -> tuple[PackedMicroBatch, ...]:
    """Return the units that this rank runs: its micro-batches or their slices, and padding for missing units.

    Every rank runs at least one micro-batch, so that it joins every collective of the step. Ranks that share experts
    run equally many, and virtual stages run whole groups (see ``plan.schedule.actions``).
    """
    step, hdp, num_slices = runtime.step.batch, runtime.hdp, runtime.slicing.num_slices
    assert step is not None, f"{step=}"
    multiple = count_multiple(runtime, chunks)
    count = micro_batch_counts(step.plan, hdp.expert_ranks, multiple)[runtime.rank] * num_slices
    if count == len(step.micro_batches) and all(step.row_counts):
        return step.micro_batches
    padding = padding_units(num_slices, hdp.rows_multiple, runtime.run.shape.window)
    mine = [
        packed if packed.num_rows else padding[index % len(padding)] for index, packed in enumerate(step.micro_batches)
    ]
    return (*mine, *padding * ((count - len(mine)) // len(padding)))


def count_multiple(runtime: Runtime, chunks: Chunks) -> int:
    """Return the divisor of every rank's number of micro-batches: the group size of virtual stages, or 1."""
    if len(chunks) == 1:
        return 1
    return int(get_model_config(chunks[0]).microbatch_group_size_per_vp_stage) // runtime.slicing.num_slices


def schedule_of(runtime: Runtime, chunks: Chunks, num_micro_batches: int) -> SliceSchedule:
    """Return the schedule of this rank's pipeline: Megatron's own order without slices, else a checked schedule."""
    num_stages, slicing = runtime.hdp.num_stages, runtime.slicing
    if slicing.num_slices > 1 or slicing.zero_bubble:
        return checked_schedule(num_stages, num_micro_batches, slicing, len(chunks))
    group = get_model_config(chunks[0]).microbatch_group_size_per_vp_stage
    return seq1f1b_schedule(num_stages, num_micro_batches, slicing, len(chunks), group)


@contextlib.contextmanager
def all_parameters_gathering(chunks: Chunks, training: bool) -> Iterator[None]:
    """With ``--overlap-param-gather``, start the parameter gathers of all chunks now, not later in the step.

    Megatron would start each gather from the previous layer or chunk. Then two ranks could wait for each other: one
    rank waits in a ring and does not reach its next layer; the other waits for that layer's parameters and does not
    reach the ring.
    """
    config = get_model_config(chunks[0])
    start, config.param_sync_func = config.param_sync_func, None
    try:
        if training and start is not None:
            for start_one, chunk in zip(start if isinstance(start, list) else [start], chunks, strict=True):
                start_one(chunk.parameters())
        yield
    finally:
        config.param_sync_func = start


def begin_step(runtime: Runtime, iterator: Any, training: bool) -> None:
    """Take the next step from the loader, agree with all ranks on its plan, and start its clock.

    Args:
        iterator: iterator of Megatron's over a loader.
        training: True in training; an evaluation has no figures.
    """
    step = next(iterator)
    if not isinstance(step, StepBatch):  # a checkpoint asks for this step again, and the loader has it
        step = next(iterator.iterable)
    step = agree_on_plan(runtime, step, lambda step: iterator.iterable.simple_step(step))
    runtime.step.batch = step
    if not training:
        return
    runtime.step.next_batch = lambda: iterator.iterable.peek()
    runtime.reset_counts()
    if step.step_index + 1 == runtime.hdp.memory_step:
        parts = runtime.parts
        parts.peak.begin(parts.clock.on_cuda, [] if parts.link is None else [parts.link.arena.memory])
    runtime.log.totals.step_started = time.perf_counter()
    runtime.parts.clock.begin(traced=step.step_index + 1 == runtime.hdp.timeline_step)


def end_step(runtime: Runtime, training: bool) -> None:
    """Add a training step to the figures, and write its timeline if ``--hdp-timeline-step`` asks for it."""
    if not training:
        return
    runtime.parts.clock.mark("end")
    runtime.count_step()
    learn_costs(runtime)
    step, config = runtime.step.batch, runtime.hdp
    assert step is not None
    first_of_tensor_group = parallel_state.get_tensor_model_parallel_rank() == 0  # one file per HDP rank
    if runtime.parts.clock.traced and config.log_dir is not None and first_of_tensor_group:
        mine = step.plan.ranks[runtime.rank]
        phases = runtime.parts.clock.phases(step.step_index + 1, runtime.rank, mine, step.lengths)
        folder = config.log_dir / "timeline"
        if config.num_stages > 1:  # one timeline per stage
            folder /= f"stage{parallel_state.get_pipeline_model_parallel_rank()}"
        append_jsonl(folder / f"rank{runtime.rank}.jsonl", map(asdict, phases), config.log_dir)


def wrap_finalize_model_grads(original: Callable[..., object], runtime: Runtime) -> Callable[..., object]:
    """Mark where a step's computation ends and the reduction of its gradients begins."""

    def finalize_model_grads(*args: object, **kwargs: object) -> object:
        runtime.parts.clock.mark("reduce")
        if runtime.parts.reductions is not None:
            runtime.parts.reductions.open()
        return original(*args, **kwargs)

    return finalize_model_grads
