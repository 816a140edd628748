"""Runs a schedule of slices through Megatron's own schedule functions (Seq1F1B).

Megatron is told that there are ``num_micro_batches * num_slices`` micro-batches. Its functions then run the order of
``bytescale_ext.plan.schedule.actions`` once three things are changed, all from outside:

- the warm-up is longer by the slices that a micro-batch has beyond one;
- a backward pass takes the slice that the schedule says, not the oldest;
- both ends of a connection know the size of each slice from the schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config

from bytescale_ext.attention.layouts.slices import SliceLayout, sample_layouts
from bytescale_ext.attention.slices import MicroBatchPrefix
from bytescale_ext.config.slices import SliceConfig
from bytescale_ext.measure.metrics import StepClock
from bytescale_ext.plan.schedule.actions import Action, SliceSchedule
from bytescale_ext.plan.schedule.messages import received_actions
from bytescale_ext.plan.schedule.slices import slice_ranges
from megatron.bytescale.core.packed_seq_params import DocumentSeqParams
from megatron.bytescale.core.parallel_state import StageLinks
from megatron.bytescale.core.pipeline_parallel.p2p_communication import (
    ReceiveAheadP2PCommunicator,
    ShapedP2PCommunicator,
)
from megatron.bytescale.registry import copy_with_names
from megatron.bytescale.runtime import Runtime


def slice_communicator(
    config: Any,
    schedule: SliceSchedule,
    num_rows: Callable[[Action], int],
    links: StageLinks | None,
    batch: int = 1,
    clock: StepClock | None = None,
) -> ShapedP2PCommunicator:
    """The communicator of a step of slices.

    Args:
        config: Megatron's, of the model.
        schedule: what the stages run.
        num_rows: of the tensor that an action takes, as it lies in memory.
        links: process groups for receiving ahead, where the previous stage is two forwards ahead; else None.
        batch: samples side by side.
        clock: see ``ShapedP2PCommunicator``.
    """
    group = parallel_state.get_pipeline_model_parallel_group()
    communicator: ShapedP2PCommunicator
    if links is not None:
        communicator = ReceiveAheadP2PCommunicator(group, config, links, clock)
    else:
        communicator = ShapedP2PCommunicator(group, config, clock)
    stage = communicator.current_stage
    from_previous, from_next = (map(num_rows, actions) for actions in received_actions(schedule, stage))
    communicator.expect(from_previous, from_next, batch, schedule.num_first_forwards(stage))
    return communicator


@dataclass
class SliceStep:
    """One step of a stage: walks through the stage's actions as Megatron's schedule calls for them.

    Attributes:
        num_slices: of each micro-batch.
        training: with backward passes.
        actions: what is left to run.
        runs: (input, output) of each slice that has run forward and not backward, by its forward action.
        prefixes: keys and values of each unfinished micro-batch, by (micro-batch, model chunk).
        action: the one that runs.
    """

    num_slices: int
    training: bool
    actions: Iterator[Action]
    runs: dict[Action, tuple[Any, Any]] = field(default_factory=dict)
    prefixes: dict[tuple[int, int], MicroBatchPrefix] = field(default_factory=dict)
    action: Action | None = None

    @classmethod
    def of(cls, schedule: SliceSchedule, training: bool) -> SliceStep:
        """The step of this stage; an evaluation has the forward passes alone."""
        actions = schedule.stages[parallel_state.get_pipeline_model_parallel_rank()]
        return cls(schedule.num_slices, training, (a for a in actions if training or a.kind == "F"))

    def forward_step(
        self, function: Any, data: Any, model: Any, count: int, inputs: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """In the place of Megatron's ``forward_step``: keeps input and output for the slice's backward pass."""
        action = self._next("F")
        result = schedules.forward_step(function, data, model, count, inputs, *args, **kwargs)
        is_last = action.slice_index == self.num_slices - 1
        if self.training:
            self.runs[action] = (inputs, result[0])
        elif is_last:
            self._release(action)
        return result

    def backward_step(self, _input: Any, _output: Any, output_grad: Any, config: Any) -> Any:
        """In the place of Megatron's ``backward_step``: of the slice that is due, whatever Megatron thinks is."""
        action = self._next("B")
        inputs, outputs = self.runs.pop(action._replace(kind="F"))
        grads = schedules.backward_step(inputs, outputs, output_grad, config)
        for tensor in inputs if isinstance(inputs, list) else [inputs]:
            if tensor is not None:  # Megatron's own list holds it until its turn comes
                tensor.grad = None
                tensor.data = tensor.new_empty(0)
        if not action.slice_index:
            self._release(action)
        return grads

    def warm_up(self, *args: Any, **kwargs: Any) -> tuple[int, bool, int, int]:
        """In the place of ``get_pp_rank_microbatches``: as many forwards more as there are slices beyond one."""
        total, all_in_warm_up, num_first, rest = schedules.get_pp_rank_microbatches(*args, **kwargs)
        if not self.training:
            return total, all_in_warm_up, num_first, rest
        num_first = min(num_first + self.num_slices - 1, total)
        return total, num_first == total, num_first, total - num_first

    def prefix(self, layout: Any) -> MicroBatchPrefix:
        """Keys and values of the micro-batch whose slice runs, of this layout; new ones for its first slice."""
        action = self.action
        assert action is not None and isinstance(layout, SliceLayout) and action.slice_index == layout.index, (
            f"{action=} {layout=}"
        )
        key = action.micro_batch, action.chunk
        if not layout.index:
            self.prefixes[key] = MicroBatchPrefix(layout.num_keys)
        return self.prefixes[key]

    def check_finished(self) -> None:
        """At the end of a step: everything has run and nothing is held."""
        left = list(self.actions)
        assert not left and not self.runs and not self.prefixes, f"{left=} {self.runs.keys()=} {self.prefixes.keys()=}"

    def _next(self, kind: str) -> Action:
        self.action = next(self.actions)
        assert self.action.kind == kind, f"{self.action=} {kind=}"
        return self.action

    def _release(self, action: Action) -> None:
        del self.prefixes[action.micro_batch, action.chunk]


def run_samples(
    runtime: Runtime,
    megatron: Callable[..., Any],
    *,
    data_iterator: Any,
    model: Any,
    num_microbatches: int,
    micro_batch_size: int,
    **kwargs: Any,
) -> Any:
    """Run every micro-batch of Megatron's samples in slices, by one of its schedule functions."""
    chunks = model if isinstance(model, list) else [model]
    iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator] * len(chunks)
    config = runtime.run.get(SliceConfig)
    schedule = config.schedule(num_microbatches)
    step = SliceStep.of(schedule, training=not kwargs.get("forward_only", False))
    layouts = sample_layouts(config.lengths, micro_batch_size)
    rows = [length // config.row_shares for length in config.lengths]
    communicator = slice_communicator(
        get_model_config(chunks[0]), schedule, lambda action: rows[action.slice_index], runtime.links, micro_batch_size
    )
    return run_in_slices(
        megatron,
        step,
        schedule,
        communicator,
        data_iterator=[sample_slices(step, runtime, layouts, iterator) for iterator in iterators],
        model=chunks,
        micro_batch_size=micro_batch_size,
        **kwargs,
    )


def sample_slices(
    step: SliceStep, runtime: Runtime, layouts: Sequence[SliceLayout], data_iterator: Any
) -> Iterator[tuple[dict[str, torch.Tensor | None], DocumentSeqParams]]:
    """Yield what one model chunk reads: the batch [b, s] of each micro-batch, once for each of its slices."""
    read_batch = runtime.read_batch
    assert read_batch is not None
    ranges = slice_ranges(runtime.run.get(SliceConfig).lengths)
    while True:
        batch = read_batch(data_iterator)
        for part, layout in zip(ranges, layouts, strict=True):
            positions = torch.arange(part.start, part.stop, device=torch.cuda.current_device())
            yield batch, DocumentSeqParams(positions=positions, layout=layout, prefix=step.prefix(layout))


def run_in_slices(
    megatron: Callable[..., Any],
    step: SliceStep,
    schedule: SliceSchedule,
    communicator: ShapedP2PCommunicator,
    **kwargs: Any,
) -> Any:
    """Run a step by one of Megatron's schedule functions; ``kwargs`` are its own, without the number of micro-batches.

    ``data_iterator`` gives, for each model chunk, the slices in the order of their forwards.
    """
    if megatron is schedules.forward_backward_no_pipelining:  # one stage: the same order, nothing to send
        megatron = schedules.forward_backward_pipelining_without_interleaving
    run = copy_with_names(
        megatron,
        forward_step=step.forward_step,
        backward_step=step.backward_step,
        get_pp_rank_microbatches=step.warm_up,
    )
    kwargs |= {
        "num_microbatches": schedule.num_micro_batches * schedule.num_slices,
        "p2p_communicator": communicator,
        "pg_collection": ProcessGroupCollection.use_mpu_process_groups(),
    }
    result = run(**kwargs)
    step.check_finished()
    communicator.check_all_received(step.training)
    return result
