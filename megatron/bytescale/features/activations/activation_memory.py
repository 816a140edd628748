"""A memory plan in training (``--memory-plan``): uses only its measurable benefits, and compares a step with it.

Swapped layers are read back into two rounding buffers of the planned size. On a GPU the planned peak is reserved before
the first step as one segment of the caching allocator, which then splits it instead of requesting device memory for
each tensor. The planned addresses are not enforced: torch's allocator sees only sizes, in an order that changes with
the lengths of micro-batches, so the n-th request of a step is not the n-th request of the plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.utils import unwrap_model

from bytescale_ext.activation.buffers import NUM_BUFFERS, RoundingBuffers, reserve
from bytescale_ext.activation.store import ActivationStore
from bytescale_ext.activation.trace import AllocationTrace
from bytescale_ext.plan.memory.placement import liveness_bound
from bytescale_ext.plan.memory.step_file import StepMemory, StepRecord
from megatron.bytescale.runtime import Runtime
from megatron.bytescale.training.pretrain_arguments import Training

TOLERANCE = 1.05
"""Factor over the planned memory above which the report of a step contains a warning."""


@dataclass
class FirstStep:
    """Traces the allocations of the first training step of a process.

    Attributes:
        store: store of the activations.
        chunks: model chunks of the process, one per virtual stage; set once they are built.
        trace: trace in progress, or None.
    """

    store: ActivationStore
    chunks: list[torch.nn.Module] = field(default_factory=list)
    trace: AllocationTrace | None = None

    def begin(self, model: torch.nn.Module) -> None:
        """Start the trace in the first forward pass of a step; parameters and gradients exist already."""
        chunks = [unwrap_model(chunk) for chunk in self.chunks] or [unwrap_model(model)]
        states = [tensor for chunk in chunks for tensor in _states(chunk)]
        self.trace = AllocationTrace([*states, self.store.link.arena.memory])
        self.trace.__enter__()
        received = getattr(getattr(unwrap_model(model), "decoder", None), "input_tensor", None)
        if received is not None:  # received from the previous stage before the forward step
            self.trace.note_input(received)

    def end(self) -> AllocationTrace:
        """End the trace after the last backward pass of the step."""
        trace, self.trace = self.trace, None
        assert trace is not None, "a step was begun"
        trace.__exit__(None, None, None)
        return trace


def around_steps(training: Training, begin: Callable[[Any], None], end: Callable[[], None]) -> Training:
    """Return a training that calls ``begin`` with the model before each forward pass, and ``end`` after each step."""

    def wrap_forward(forward_step: Callable[..., Any]) -> Callable[..., Any]:
        def forward(data_iterator: Any, model: Any) -> Any:
            if model.training:
                begin(model)
            return forward_step(data_iterator, model)

        return forward

    def wrap_finalize(finalize: Callable[..., Any]) -> Callable[..., Any]:
        def end_and_finalize(*args: Any, **kwargs: Any) -> Any:
            end()
            return finalize(*args, **kwargs)

        return end_and_finalize

    return training.wrap_finalize(wrap_finalize).wrap_forward_step(wrap_forward)


@dataclass
class PlannedMemory:
    """A memory plan in one process, from its first forward pass on.

    Attributes:
        memory: plan of this rank.
        store: store of the activations.
        on_cuda: whether the process computes on a GPU.
        prints: whether this process prints the report.
        role: role of this rank in the report, if there are several.
        step: trace of the first step, on CPU.
    """

    memory: StepMemory
    store: ActivationStore
    on_cuda: bool
    prints: bool
    role: str = ""
    step: FirstStep = field(init=False)
    _used_before: int = field(default=0, init=False)
    _is_done: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.step = FirstStep(self.store)

    @classmethod
    def of(cls, runtime: Runtime) -> PlannedMemory:
        """Return the memory plan of a run, before its first step."""
        memory, process = runtime.run.get(StepMemory), runtime.run.process
        return cls(memory, store_of(runtime), process.on_cuda, process.hdp_rank == 0, role_of(runtime, memory.record))

    def around(self, training: Training) -> Training:
        """Return a training that reserves the memory in its first forward pass."""
        training.model.pre_wrap_hooks.append(self.see_model)
        return around_steps(training, self.begin, self.end)

    def see_model(self, model_chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
        """Hook in ``ModelConfig.pre_wrap_hooks``: store all model chunks."""
        self.step.chunks = model_chunks
        return model_chunks

    @property
    def peak(self) -> int:
        """The planned memory in bytes."""
        return self.memory.plan.model.peak

    def begin(self, model: torch.nn.Module) -> None:
        """Reserve the planned memory and start to measure, in the first forward pass of a run."""
        if self._is_done or self.step.trace is not None or self._used_before:
            return
        device = torch.device("cuda", torch.cuda.current_device()) if self.on_cuda else torch.device("cpu")
        if self.on_cuda:
            torch.cuda.reset_peak_memory_stats()
            self._used_before = max(1, torch.cuda.memory_allocated())
            reserve(self.peak, device)
        if self.memory.buffer_bytes:
            self.store.buffers = RoundingBuffers(self.memory.buffer_bytes, device)
        if not self.on_cuda:
            self.step.begin(model)

    def end(self) -> None:
        """Compare the memory of the first step with the plan after the step's last backward pass."""
        if self._is_done:
            return
        self._is_done = True
        if self.on_cuda:
            used = torch.cuda.max_memory_allocated() - self._used_before
        else:
            used = liveness_bound(self.step.end().requests())
        if self.prints:
            print(self.report(used), flush=True)

    def report(self, used: int) -> str:
        """Return a line that compares the memory of the first step, in bytes, with the plan."""
        # At the end of its layer a buffer is freed whole, while the plan frees its tensors one by one.
        most = TOLERANCE * self.peak + NUM_BUFFERS * self.memory.buffer_bytes
        verdict = "" if used <= most else "; this exceeds the plan: record it with longer micro-batches"
        note = "" if self.on_cuda else "; on CPU no memory is reserved, but rounding buffers are used"
        return (
            f"> bytescale: memory plan{self.role}: {self.peak / 1e6:.3f} MB planned, {used / 1e6:.3f} MB at most in "
            f"the first step{verdict}{note}"
        )


def store_of(runtime: Runtime) -> ActivationStore:
    """Return the store of the activations, which always exists with a memory plan."""
    assert runtime.parts.activations is not None, "a memory plan has an activation policy"
    return runtime.parts.activations


def role_of(runtime: Runtime, record: StepRecord) -> str:
    """Return this process's stage and tensor-parallel rank for messages; "" if neither is divided."""
    process, layout = runtime.run.process, record.layout
    parts = [f"stage {process.stage}"] * (layout.num_stages > 1)
    parts += [f"tensor rank {process.tensor_rank}"] * (layout.tensor_parallel > 1)
    return f" of {', '.join(parts)}" if parts else ""


def _states(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return parameters and gradients, which exist before a step."""
    tensors: list[torch.Tensor] = []
    for parameter in model.parameters():
        grads: list[Any] = [getattr(parameter, "main_grad", None), parameter.grad]
        tensors += [parameter.detach(), *(grad for grad in grads if grad is not None)]
    return tensors
