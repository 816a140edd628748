"""Run micro-batches in slices by Megatron's own schedule functions (Seq1F1B).

Megatron takes each slice for a micro-batch. Its functions then run the order of ``plan.schedule.actions`` with three
changes, all of which are made from outside:

- a stage runs more forwards before its first backward;
- a backward pass takes the slice that the schedule names, not the oldest;
- sender and receiver take the size of each slice from the schedule.

Weight gradients that the schedule names by themselves run once the messages of the pass before are posted.
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
"""What a stage receives, computes or sends: Megatron passes a tensor, or a list with one entry per input."""
DataIterators = Iterator[object] | list[Iterator[object]]
"""The data iterator of a process, or that of each model chunk."""


@dataclass
class SliceStep:
    """One step of a stage in slices. Follows the stage's actions as Megatron's schedule calls for them.

    Attributes:
        schedule: what the stages run.
        stage: this pipeline stage.
        training: with backward passes; an evaluation runs the forward passes alone.
        wait_for: waits until a received tensor may be read.
        mark: marks a phase of the step.
        link: to host memory, for swapped keys; None where none are swapped.
        actions: the actions that have not run yet.
        action: the running action.
        runs: (input, output) of each slice between its forward and its backward pass, by its forward action.
        prefixes: keys and values of each unfinished micro-batch, by (micro-batch, model chunk).
        swaps: how each model chunk swaps keys.
        expert_loads: what routers of experts note for the other slices of a micro-batch.
        weight_gradients: those that the schedule names by themselves, until it does.
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
        self.actions = deque(one for one in self.schedule.stages[self.stage] if self.training or one.kind == "F")
        self.expert_loads = ExpertLoads(self.schedule.num_slices)

    def in_slices(self, megatron: Callable[..., object]) -> Callable[..., object]:
        """Return a copy of one of Megatron's schedule functions that runs this step."""
        if megatron is schedules.forward_backward_no_pipelining:  # one stage: the same order, nothing to send
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
        """Replace Megatron's ``forward_step``: keep input and output [t, b, h] for the slice's backward pass."""
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
        """Replace Megatron's ``backward_step``: run the slice that is due, not the one that Megatron passes.

        Takes and returns gradients [t, b, h].
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
        if not self.stage and all(one.kind == "W" for one in self.actions):  # the first stage sends nothing now
            self.run_weights()
        return grads

    def run_weights(self) -> None:
        """Compute the weight gradients that come next in the schedule."""
        while self.actions and self.actions[0].kind == "W":
            self.action = self.actions.popleft()
            self.mark("backward")
            self.weight_gradients.run(self.action, is_last=not self.actions)
            self.mark("wait")

    def warm_up(self, *_: object, **__: object) -> tuple[int, bool, int, int]:
        """Replace ``get_pp_rank_microbatches``.

        Returns:
            All forwards of the stage, whether all run before the first backward, how many do, and the others.
        """
        total = self.schedule.num_forwards
        num_first = self.schedule.num_first_forwards(self.stage) if self.training else total
        return total, num_first == total, num_first, total - num_first

    def prefix(self, layout: object) -> MicroBatchPrefix:
        """Return the keys and values of the micro-batch whose slice runs; new ones for its first slice."""
        action = self.action
        assert action is not None and isinstance(layout, SliceLayout) and action.slice_index == layout.index, (
            f"{action=} {layout=}"
        )
        key = action.micro_batch, action.chunk
        if not layout.index:
            self.prefixes[key] = MicroBatchPrefix(swap=self.swap_of(action.chunk))
        return self.prefixes[key]

    def swap_of(self, chunk: int) -> KeySwap | None:
        """Return how a model chunk swaps keys."""
        if self.link is None:
            return None
        return self.swaps.setdefault(chunk, KeySwap(partial(SwappedKeys, link=self.link), self.read_next_keys))

    def read_next_keys(self) -> None:
        """Start reading the swapped keys of the slice that runs next, in its first layer."""
        action = next((one for one in self.actions if one.kind != "W"), None)
        prefix = None if action is None else self.prefixes.get((action.micro_batch, action.chunk))
        if action is not None and prefix is not None:
            prefix.read_ahead(backward=action.kind == "B")

    def check_finished(self) -> None:
        """Assert at the end of a step that every action has run and nothing is held."""
        assert not self.actions and not self.runs and not self.prefixes, (
            f"{self.actions=} {self.runs.keys()=} {self.prefixes.keys()=}"
        )
        if self.link is not None:
            self.link.settle()
            assert not self.link.used_bytes, f"{self.link.used_bytes=}"
        assert self.weight_gradients.is_empty
        assert not self.expert_loads.unfinished, f"{self.expert_loads.unfinished.keys()=}"

    def _next(self, kind: Kind) -> Action:
        self.run_weights()  # those that no message has waited for
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
    """Run every micro-batch of Megatron's samples in slices, by one of its schedule functions."""
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
        data_iterator=[sample_slices(step, runtime, layouts, limited, iterator) for iterator in iterators],
        model=chunks,
        micro_batch_size=micro_batch_size,
        **options,
    )


def sample_slices(
    step: SliceStep,
    runtime: Runtime,
    layouts: Sequence[SliceLayout],
    window_layouts: Sequence[SliceLayout] | None,
    data_iterator: Iterator[object],
) -> Iterator[tuple[dict[str, torch.Tensor | None], DocumentSeqParams]]:
    """Yield the inputs of one model chunk: for each slice, the tensors [b, s] of its whole micro-batch, and its layout.

    Args:
        step: the running step.
        layouts: of each slice of a micro-batch.
        window_layouts: the same in layers with a sliding window; None: no layer has one.
        data_iterator: Megatron's, over samples.
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
    """Run a step by one of Megatron's schedule functions, and check that all of it has run.

    Args:
        megatron: the function.
        schedule: what the stages run.
        communicator: of this stage.
        step: the state of slices; None where micro-batches run whole.
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
