"""Routers that start dense: each step's temperature, each token's noise, and the count of active experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from megatron.core import parallel_state
from megatron.core.utils import unwrap_model
from megatron.training.utils import print_rank_last

from bytescale_ext.config.hdp import HdpConfig
from bytescale_ext.config.slices import SliceConfig
from bytescale_ext.plan.experts.gate import DenseToSparse
from bytescale_ext.plan.schedule.slices import slice_ranges
from megatron.bytescale.arguments.options import current
from megatron.bytescale.arguments.running import SampleBatches, running_step
from megatron.bytescale.core.packed_seq_params import PackedUnit
from megatron.bytescale.core.transformer.moe.gate import Gate, with_gate
from megatron.bytescale.core.transformer.token_noise import numbers_of_documents, numbers_of_samples
from megatron.bytescale.features.experts.loads import after_steps
from megatron.bytescale.runtime import Runtime
from megatron.bytescale.training.pretrain_arguments import Training
from megatron.bytescale.training.stock import ForwardStep, LossFunction
from megatron.bytescale.training.training import write_scalars


def anneal(training: Training, runtime: Runtime) -> Training:
    """Make the routers of all layers follow a gate, whose temperature falls from step to step."""
    gate = Gate(runtime.run.get(DenseToSparse))
    numbering = None if gate.plan.noise_seed is None else Numbering(gate, runtime.run.find(HdpConfig) is not None)
    if numbering is not None and (slices := runtime.run.find(SliceConfig)) is not None:
        numbering.parts = tuple(range(part.start, part.stop) for part in slice_ranges(slices.lengths))
    training = training.wrap_all_layer_specs(partial(with_gate, gate=gate), runtime)
    training = training.wrap_forward_step(partial(_heated, gate))
    if numbering is not None:
        training = training.wrap_forward_step(numbering.wrap)
    return after_steps(training, ActiveExperts(gate, runtime))


def _heated[**P, R](gate: Gate, forward: Callable[P, R]) -> Callable[P, R]:
    """Return a forward step that sets the gate's temperature for its step."""

    def forward_at_temperature(*args: P.args, **kwargs: P.kwargs) -> R:
        gate.step = running_step()
        gate.temperature = gate.plan.temperature(gate.step)
        return forward(*args, **kwargs)

    return forward_at_temperature


@dataclass
class Numbering:
    """Numbers the tokens of each pass, for their noise; a recomputed pass gets the same numbers.

    Megatron's samples are numbered in the order of its sampler: micro-batch by micro-batch, rank by rank.

    Attributes:
        gate: gate that uses the noise.
        of_documents: whether passes contain documents, which determine their tokens' numbers.
        parts: slices of a sample; empty without slices.
        step: step of the counted passes.
        passes: model chunk -> number of its forward passes in the step.
    """

    gate: Gate
    of_documents: bool
    parts: tuple[range, ...] = ()
    step: int = -1
    passes: dict[int, int] = field(default_factory=dict)

    def wrap(self, forward: ForwardStep) -> ForwardStep:
        """Return a forward step that numbers its tokens."""

        def forward_with_numbers(
            data_iterator: Iterator[PackedUnit], model: torch.nn.Module, *args: object, **kwargs: object
        ) -> tuple[torch.Tensor, LossFunction]:
            if not model.training:
                return forward(data_iterator, model, *args, **kwargs)
            if self.of_documents:
                data_iterator = self._numbered(data_iterator)
            else:
                self.gate.tokens = self._of_samples(unwrap_model(model).vp_stage or 0)
            output, rest = forward(data_iterator, model, *args, **kwargs)
            tokens = self.gate.tokens

            def before_backward(_: torch.Tensor) -> None:
                self.gate.tokens = tokens

            if output.requires_grad:
                output.register_hook(before_backward)
            return output, rest

        return forward_with_numbers

    def _numbered(self, units: Iterator[PackedUnit]) -> Iterator[PackedUnit]:
        """Yield units of documents after numbering their tokens."""
        for unit in units:
            self.gate.tokens = numbers_of_documents(unit[1]).to(torch.cuda.current_device())
            yield unit

    def _of_samples(self, chunk: int) -> torch.Tensor:
        """Return the token numbers int64 [rows, b] of a model chunk's next pass."""
        batches, step = current(SampleBatches), running_step()
        if self.step != step:
            self.step, self.passes = step, {}
        number = self.passes[chunk] = self.passes.get(chunk, -1) + 1
        micro_batch, part = divmod(number, max(1, len(self.parts)))
        rows = batches.seq_length // batches.context_parallel_size
        first = rows * parallel_state.get_context_parallel_rank()
        positions = self.parts[part] if self.parts else range(first, first + rows)
        group = micro_batch * batches.data_parallel_size + parallel_state.get_data_parallel_rank()
        size = batches.micro_batch_size
        return numbers_of_samples(group * size, size, positions).to(torch.cuda.current_device())


@dataclass
class ActiveExperts:
    """Counts the experts per token over all ranks after each step while the gate anneals, and logs the mean.

    Attributes:
        gate: gate that anneals.
        runtime: runtime of this process; its log line and FLOPs use the mean of each step.
        active, num_tokens: sums since the last log line.
    """

    gate: Gate
    runtime: Runtime
    active: float = 0.0
    num_tokens: float = 0.0

    def __call__(self) -> None:
        """Count a step. Collective on all processes while the gate anneals."""
        step = running_step() + 1
        self.runtime.step.active_experts = float(self.runtime.run.shape.experts_per_token)
        if self.gate.plan.temperature(step - 1) is not None:
            sums = torch.zeros(2, dtype=torch.float64, device=self.runtime.device)
            for place, number in enumerate(self.gate.take_active()):
                sums[place] += number
            torch.distributed.all_reduce(sums)
            active, num_tokens = sums.tolist()
            self.runtime.step.active_experts = active / max(1.0, num_tokens)
            self.active, self.num_tokens = self.active + active, self.num_tokens + num_tokens
        if step % self.runtime.run.process.log_interval == 0 and self.num_tokens:
            mean = self.active / self.num_tokens
            print_rank_last(f"> bytescale: {mean:.3f} experts per token since the last line")
            write_scalars({"experts/active": mean}, step)
            self.active = self.num_tokens = 0.0
