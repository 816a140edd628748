"""Runs micro-batches in slices with Megatron's own schedule functions (Seq1F1B).

Megatron treats each slice as a micro-batch. Its functions then run the order of ``plan.schedule.actions`` with three
changes, which are injected from outside:

- a stage runs more forwards before its first backward;
- a backward pass runs the slice that the schedule names, not the oldest slice;
- sender and receiver take the size of each slice from the schedule.

Weight gradients that the schedule lists as separate actions run once the messages of the previous pass are posted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config

from bytescale_ext.activation.keys import SwappedKeys
from bytescale_ext.activation.link import Link
from bytescale_ext.attention.layouts.slices import SliceLayout, sample_layouts
from bytescale_ext.attention.slices import KeySwap, MicroBatchPrefix
from bytescale_ext.config.slices import SliceConfig
from bytescale_ext.plan.schedule.actions import Action, Kind, SliceSchedule
from bytescale_ext.plan.schedule.slices import slice_ranges
from megatron.bytescale.core.packed_seq_params import DocumentSeqParams
from megatron.bytescale.core.pipeline_parallel.p2p_communication import (
    NeighbourP2PCommunicator,
    ShapedP2PCommunicator,
    stage_communicator,
)
from megatron.bytescale.core.tensor_parallel.weight_gradients import WeightGradients
from megatron.bytescale.core.transformer.moe.loads import ExpertLoads
from megatron.bytescale.registry import copy_with_names
from megatron.bytescale.runtime import Runtime

if TYPE_CHECKING:
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.transformer_config import TransformerConfig

Tensors = torch.Tensor | list[torch.Tensor | None] | None
"""Tensors that a stage receives, computes or sends: Megatron passes a tensor, or a list with one entry per input."""
DataIterators = Iterator[object] | list[Iterator[object]]
"""The data iterator of a process, or a list with one iterator per model chunk."""


@dataclass
class SliceStep:
    """One step of a stage in slices. It follows the stage's actions as Megatron's schedule calls for them.

    Attributes:
        schedule: actions of all stages.
        stage: index of this pipeline stage.
        training: whether backward passes run; an evaluation has only forward passes.
        wait_for: waits until a received tensor is ready to read.
        mark: marks a phase of the step.
        link: link to host memory for swapped keys; None if no keys are swapped.
        actions: actions that have not run yet.
        action: the current action.
        runs: forward action -> (input, output) of its slice, until the backward pass.
        prefixes: (micro-batch, model chunk) -> keys and values of an unfinished micro-batch.
        swaps: model chunk -> its key swap.
        expert_loads: loads that expert routers record for the other slices of a micro-batch.
        weight_gradients: postponed weight gradients, until the schedule's separate actions compute them.
    """

    schedule: SliceSchedule
    stage: int
    training: bool
    wait_for: Callable[[Tensors], None] = lambda tensor: None
    mark: Callable[[str], None] = lambda kind: None
    link: Link | None = None
    actions: deque[Action] = field(init=False)
    action: Action | None = None
    runs: dict[Action, tuple[Tensors, Tensors]] = field(default_factory=dict)
    prefixes: dict[tuple[int, int], MicroBatchPrefix] = field(default_factory=dict)
    swaps: dict[int, KeySwap] = field(default_factory=dict)
    expert_loads: ExpertLoads = field(init=False)
    weight_gradients: WeightGradients = field(default_factory=WeightGradients)

    def __post_init__(self) -> None:
        self.actions = deque(
            action for action in self.schedule.stages[self.stage] if self.training or action.kind == "F"
        )
        self.expert_loads = ExpertLoads(self.schedule.num_slices)

    def in_slices(self, megatron: Callable[..., object]) -> Callable[..., object]:
        """Return a copy of one of Megatron's schedule functions that runs this step."""
        if megatron is schedules.forward_backward_no_pipelining:  # one stage: same order, no messages
            megatron = schedules.forward_backward_pipelining_without_interleaving
        return copy_with_names(
            megatron,
            forward_step=self.forward_step,
            backward_step=self.backward_step,
            get_pp_rank_microbatches=self.warm_up,
        )

    def forward_step(
        self,
        function: Callable[..., object],
        data: Iterator[object],
        model: MegatronModule,
        count: int,
        inputs: Tensors,
        *args: object,
        **kwargs: object,
    ) -> tuple[Tensors, torch.Tensor]:
        """Replace Megatron's ``forward_step``: keep the input and output [t, b, h] for the slice's backward pass."""
        action = self._next("F")
        self.wait_for(inputs)
        result = schedules.forward_step(function, data, model, count, inputs, *args, **kwargs)
        if self.training:
            self.runs[action] = (inputs, result[0])
        elif action.slice_index == self.schedule.num_slices - 1:
            self._release(action)
        return result

    def backward_step(
        self, _input: Tensors, _output: Tensors, output_grad: Tensors, config: TransformerConfig
    ) -> Tensors:
        """Replace Megatron's ``backward_step``: run the slice that the schedule names, not the slice Megatron passes.

        The gradients taken and returned are [t, b, h].
        """
        action = self._next("B")
        inputs, outputs = self.runs.pop(action._replace(kind="F"))
        self.wait_for(output_grad)
        if self.schedule.slicing.zero_bubble:
            self.weight_gradients.collect(action._replace(kind="W"))
        grads = schedules.backward_step(inputs, outputs, output_grad, config)
        for tensor in inputs if isinstance(inputs, list) else [inputs]:
            if tensor is not None:  # Megatron's own list still holds the tensor: free its memory now
                tensor.grad = None
                tensor.data = tensor.new_empty(0)
        if not action.slice_index:
            self._release(action)
        if not self.stage and all(action.kind == "W" for action in self.actions):  # no sends are left to overlap
            self.run_weights()
        return grads

    def run_weights(self) -> None:
        """Compute the weight gradients whose actions come next in the schedule."""
        while self.actions and self.actions[0].kind == "W":
            self.action = self.actions.popleft()
            self.mark("backward")
            self.weight_gradients.run(self.action, is_last=not self.actions)
            self.mark("wait")

    def warm_up(self, *_: object, **__: object) -> tuple[int, bool, int, int]:
        """Replace ``get_pp_rank_microbatches``.

        Returns:
            Number of forwards, whether all precede the first backward, number that do, and number of the others.
        """
        total = self.schedule.num_forwards
        num_first = self.schedule.num_first_forwards(self.stage) if self.training else total
        return total, num_first == total, num_first, total - num_first

    def prefix(self, layout: object) -> MicroBatchPrefix:
        """Return the keys and values of the current slice's micro-batch; they are empty for its first slice."""
        action = self.action
        assert action is not None and isinstance(layout, SliceLayout) and action.slice_index == layout.index, (
            f"{action=} {layout=}"
        )
        key = action.micro_batch, action.chunk
        if not layout.index:
            self.prefixes[key] = MicroBatchPrefix(swap=self.swap_of(action.chunk))
        return self.prefixes[key]

    def swap_of(self, chunk: int) -> KeySwap | None:
        """Return the key swap of a model chunk; None if keys are not swapped."""
        if self.link is None:
            return None
        return self.swaps.setdefault(chunk, KeySwap(partial(SwappedKeys, link=self.link), self.read_next_keys))

    def read_next_keys(self) -> None:
        """Start to read swapped keys for the first layer of the slice that runs next."""
        action = next((action for action in self.actions if action.kind != "W"), None)
        prefix = None if action is None else self.prefixes.get((action.micro_batch, action.chunk))
        if action is not None and prefix is not None:
            prefix.read_ahead(backward=action.kind == "B")

    def check_finished(self) -> None:
        """Assert at the end of a step that every action has run and no tensor is still held."""
        assert not self.actions and not self.runs and not self.prefixes, (
            f"{self.actions=} {self.runs.keys()=} {self.prefixes.keys()=}"
        )
        if self.link is not None:
            self.link.settle()
            assert not self.link.used_bytes, f"{self.link.used_bytes=}"
        assert self.weight_gradients.is_empty
        assert not self.expert_loads.unfinished, f"{self.expert_loads.unfinished.keys()=}"

    def _next(self, kind: Kind) -> Action:
        self.run_weights()  # weight gradients that did not run while waiting for a message
        self.action = self.expert_loads.action = self.actions.popleft()
        assert self.action.kind == kind, f"{self.action=} {kind=}"
        return self.action

    def _release(self, action: Action) -> None:
        self.prefixes.pop((action.micro_batch, action.chunk), None)
        self.expert_loads.release(action)


def run_samples(
    runtime: Runtime,
    megatron: Callable[..., object],
    *,
    data_iterator: DataIterators,
    model: MegatronModule | list[MegatronModule],
    num_microbatches: int,
    micro_batch_size: int,
    **options: object,
) -> object:
    """Run every micro-batch of Megatron's samples in slices, with one of its schedule functions."""
    chunks = model if isinstance(model, list) else [model]
    iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator] * len(chunks)
    config = runtime.run.get(SliceConfig)
    schedule = config.schedule(num_microbatches)
    stage = parallel_state.get_pipeline_model_parallel_rank()
    training = not options.get("forward_only", False)
    step = SliceStep(schedule, stage, training)
    runtime.step.expert_loads, runtime.step.weight_gradients = step.expert_loads, step.weight_gradients
    if step.training and runtime.parts.activations is not None:
        runtime.parts.activations.begin_step(schedule.stages[stage])
    layouts, window = sample_layouts(config.lengths, micro_batch_size), runtime.run.shape.window
    limited = None if window is None else sample_layouts(config.lengths, micro_batch_size, window)
    rows = [length // config.row_shares for length in config.lengths]
    communicator = stage_communicator(
        get_model_config(chunks[0]),
        schedule,
        lambda action: rows[action.slice_index],
        runtime.parts.links,
        micro_batch_size,
    )
    return run_schedule(
        megatron,
        schedule,
        communicator,
        step,
        data_iterator=[slice_inputs(step, runtime, layouts, limited, iterator) for iterator in iterators],
        model=chunks,
        micro_batch_size=micro_batch_size,
        **options,
    )


def slice_inputs(
    step: SliceStep,
    runtime: Runtime,
    layouts: Sequence[SliceLayout],
    window_layouts: Sequence[SliceLayout] | None,
    data_iterator: Iterator[object],
) -> Iterator[tuple[dict[str, torch.Tensor | None], DocumentSeqParams]]:
    """Yield the inputs of one model chunk, per slice: its layout and the tensors [b, s] of its whole micro-batch.

    Args:
        step: the current step.
        layouts: layout of each slice of a micro-batch.
        window_layouts: layouts for layers with a sliding window; None without such layers.
        data_iterator: iterator of Megatron's over samples.
    """
    read_batch = runtime.parts.read_batch
    assert read_batch is not None
    ranges = slice_ranges(runtime.run.get(SliceConfig).lengths)
    limits: Sequence[SliceLayout | None] = window_layouts or [None] * len(layouts)
    while True:
        batch = read_batch(data_iterator)
        for part, layout, limited in zip(ranges, layouts, limits, strict=True):
            positions = torch.arange(part.start, part.stop, device=torch.cuda.current_device())
            yield (
                batch,
                DocumentSeqParams(
                    positions=positions, layout=layout, window_layout=limited, prefix=step.prefix(layout)
                ),
            )


def run_schedule(
    megatron: Callable[..., object],
    schedule: SliceSchedule,
    communicator: ShapedP2PCommunicator,
    step: SliceStep | None,
    **options: object,
) -> object:
    """Run a step with one of Megatron's schedule functions, and check that all of it has run.

    Args:
        megatron: schedule function.
        schedule: actions of all stages.
        communicator: communicator of this stage.
        step: state of slices; None if micro-batches run whole.
        options: arguments of the function; ``data_iterator`` gives each model chunk its inputs in order.
    """
    run = megatron if step is None else step.in_slices(megatron)
    if step is not None:
        step.wait_for = communicator.wait_for
    if step is not None and isinstance(communicator, NeighbourP2PCommunicator):
        communicator.while_waiting = step.run_weights
    options |= {
        "num_microbatches": schedule.num_micro_batches * schedule.num_slices,
        "p2p_communicator": communicator,
        "pg_collection": ProcessGroupCollection.use_mpu_process_groups(),
    }
    result = run(**options)
    if step is not None:
        step.check_finished()
    communicator.check_all_received(training=not options.get("forward_only", False))
    return result
