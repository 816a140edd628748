"""Runs a planned step through Megatron's own schedule, with and without pipelines.

HDP rank r is pipeline r: all its stages have the micro-batches of rank r, and the rings of a micro-batch run in each
stage among that stage's own dp-cp group. Pipelines differ in their number of micro-batches. Nothing waits in a
circle, because a plan for pipelines is aligned (a sequence has the same micro-batch index on every rank of its ring)
and because Megatron's schedules treat equal indices alike whatever the number: see ``plan.schedule.actions``.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config

from bytescale_ext.config.slices import SliceConfig
from bytescale_ext.data.samples.packed import PackedMicroBatch
from bytescale_ext.data.samples.units import padding_units
from bytescale_ext.measure.metrics import append_jsonl
from bytescale_ext.plan.schedule.check import checked_schedule
from bytescale_ext.plan.step.placed import micro_batch_counts
from megatron.bytescale.core.pipeline_parallel.agreement import agree_on_plan
from megatron.bytescale.core.pipeline_parallel.p2p_communication import PlannedP2PCommunicator
from megatron.bytescale.core.pipeline_parallel.seq1f1b import (
    SliceStep,
    run_in_slices,
    run_samples,
    slice_communicator,
)
from megatron.bytescale.runtime import Runtime


def wrap_get_forward_backward_func(original: Callable[..., Any], runtime: Runtime) -> Callable[..., Any]:
    """Run planned steps of documents, or samples in slices, by the schedule that Megatron chooses."""
    run = run_step if runtime.run.find(SliceConfig) is None else run_samples

    def get_forward_backward_func(*args: Any, **kwargs: Any) -> Callable[..., Any]:
        return partial(run, runtime, original(*args, **kwargs))

    return get_forward_backward_func


def run_step(runtime: Runtime, schedule: Callable[..., Any], *, data_iterator: Any, model: Any, **kwargs: Any) -> Any:
    """Hand Megatron's schedule this rank's micro-batches of the step, however many there are.

    One item of the data iterator is a whole step. With virtual stages there is an iterator for each model chunk;
    the first one gives the step, and all chunks run its micro-batches. With ``--seq1f1b-slices`` each micro-batch is
    run in slices.
    """
    del kwargs["num_microbatches"]  # Megatron's number is equal on all ranks
    chunks = model if isinstance(model, list) else [model]
    iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
    training = not kwargs.get("forward_only", False)
    begin_step(runtime, iterators[0], training)
    run = run_slices if runtime.slicing.num_slices > 1 else run_micro_batches
    with all_parameters_gathering(chunks, training):
        result = run(runtime, schedule, chunks, training, kwargs)
    end_step(runtime, training)
    return result


def run_micro_batches(
    runtime: Runtime, schedule: Callable[..., Any], chunks: list[Any], training: bool, options: dict[str, Any]
) -> Any:
    """Run the step's micro-batches by Megatron's schedule."""
    micro_batches = micro_batches_of_step(runtime, chunks)
    communicator = None
    if runtime.hdp.num_stages > 1:
        communicator = stage_communicator(runtime, chunks, micro_batches, training)
        options |= {
            "p2p_communicator": communicator,
            "pg_collection": ProcessGroupCollection.use_mpu_process_groups(),
        }
    result = schedule(
        data_iterator=[((index, packed, None) for index, packed in enumerate(micro_batches)) for _ in chunks],
        num_microbatches=len(micro_batches),
        model=chunks,
        **options,
    )
    if communicator is not None:
        communicator.check_all_received(training)
    return result


def run_slices(
    runtime: Runtime, schedule: Callable[..., Any], chunks: list[Any], training: bool, options: dict[str, Any]
) -> Any:
    """Run the slices of the step's micro-batches by Megatron's schedule, in the order of ``plan.schedule.actions``.

    A rank's order depends on nothing but the numbers of micro-batch and slice, so what holds for aligned micro-batches
    of pipelines with different counts holds for aligned slices: nobody waits in a circle.
    """
    slicing, num_slices = runtime.slicing, runtime.slicing.num_slices
    slices = micro_batches_of_step(runtime, chunks)
    order = checked_schedule(runtime.hdp.num_stages, len(slices) // num_slices, slicing, len(chunks))
    step = SliceStep.of(order, training)
    shares = _row_shares(chunks)
    communicator = slice_communicator(
        get_model_config(chunks[0]),
        order,
        lambda action: slices[action.micro_batch * num_slices + action.slice_index].num_rows // shares,
        runtime.links,
        clock=runtime.clock if training else None,
    )
    data = [
        ((unit // num_slices, packed, step.prefix(packed.layout)) for unit, packed in enumerate(slices)) for _ in chunks
    ]
    return run_in_slices(schedule, step, order, communicator, data_iterator=data, model=chunks, **options)


def micro_batches_of_step(runtime: Runtime, chunks: list[Any]) -> tuple[PackedMicroBatch, ...]:
    """What this rank runs: its micro-batches, or their slices; where the plan has a hole or too few, padding alone.

    A rank runs at least one, so it joins every collective of the step, whatever overlaps with what; as many as the
    ranks that it shares experts with; and with virtual stages whole groups, see ``plan.schedule.actions``.
    """
    step, hdp, num_slices = runtime.step, runtime.hdp, runtime.slicing.num_slices
    assert step is not None, f"{step=}"
    group = get_model_config(chunks[0]).microbatch_group_size_per_vp_stage if len(chunks) > 1 else num_slices
    multiple = group // num_slices
    count = micro_batch_counts(step.plan, hdp.expert_ranks, multiple)[runtime.rank] * num_slices
    padding = padding_units(num_slices, hdp.rows_multiple)
    mine = [
        packed if packed.num_rows else padding[index % len(padding)] for index, packed in enumerate(step.micro_batches)
    ]
    return (*mine, *padding * ((count - len(mine)) // len(padding)))


def stage_communicator(
    runtime: Runtime, chunks: list[Any], micro_batches: tuple[PackedMicroBatch, ...], training: bool
) -> PlannedP2PCommunicator:
    """The communicator between this stage and its neighbours for one step."""
    shares = _row_shares(chunks)
    return PlannedP2PCommunicator(
        parallel_state.get_pipeline_model_parallel_group(),
        get_model_config(chunks[0]),
        [packed.num_rows // shares for packed in micro_batches],
        runtime.clock if training else None,
    )


def _row_shares(chunks: list[Any]) -> int:
    """Ranks that share the rows between layers."""
    is_shared = get_model_config(chunks[0]).sequence_parallel
    return parallel_state.get_tensor_model_parallel_world_size() if is_shared else 1


@contextlib.contextmanager
def all_parameters_gathering(chunks: list[Any], training: bool) -> Iterator[None]:
    """With ``--overlap-param-gather``: start the parameter gathers of all chunks, and keep Megatron from doing so.

    Megatron would start each from the layer or the chunk before it. But a rank that waits in a ring does not reach
    its next layer, and a rank that waits for that layer's parameters does not reach the ring.
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
    """Take the next step of Megatron's iterator over a loader, agree on its plan with all ranks, start its clock."""
    step = runtime.step = agree_on_plan(runtime, next(iterator), lambda step: iterator.iterable.simple_step(step))
    if not training:
        return
    runtime.reset_counts()
    runtime.totals.step_started = time.perf_counter()
    runtime.clock.begin(traced=step.step_index + 1 == runtime.hdp.timeline_step)


def end_step(runtime: Runtime, training: bool) -> None:
    """Count the step's figures, and write its timeline if this is the step asked for."""
    if not training:
        return
    runtime.clock.mark("end")
    runtime.count_step()
    step, config = runtime.step, runtime.hdp
    assert step is not None
    first_of_tensor_group = parallel_state.get_tensor_model_parallel_rank() == 0  # one file for each HDP rank
    if runtime.clock.traced and config.log_dir is not None and first_of_tensor_group:
        mine = step.plan.ranks[runtime.rank]
        spans = runtime.clock.spans(step.step_index + 1, runtime.rank, mine, step.lengths)
        folder = config.log_dir / "timeline"
        if config.num_stages > 1:  # each stage is a timeline of its own
            folder /= f"stage{parallel_state.get_pipeline_model_parallel_rank()}"
        append_jsonl(folder / f"rank{runtime.rank}.jsonl", map(asdict, spans))


def wrap_finalize_model_grads(original: Callable[..., Any], runtime: Runtime) -> Callable[..., Any]:
    """``config.finalize_model_grads_func``: Megatron's own, with the moment noted at which the work ends."""

    def finalize_model_grads(*args: Any, **kwargs: Any) -> Any:
        runtime.clock.mark("reduce")
        return original(*args, **kwargs)

    return finalize_model_grads
