"""A memory plan in training (``--memory-plan``): enables only what measurably helps, and compares a step with the plan.

Swapped layers are read back into two rounding buffers of the planned size. On a GPU the planned peak is reserved before
the first step as one segment of the caching allocator, which then splits it instead of asking the device for memory
tensor by tensor. The addresses of the plan are not enforced: torch's allocator sees only sizes, in an order that
changes with the lengths of micro-batches, so the n-th request of a step is not the n-th of the plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from bytescale_ext.activation.buffers import NUM_BUFFERS, RoundingBuffers, reserve
from bytescale_ext.activation.store import ActivationStore
from bytescale_ext.activation.trace import AllocationTrace
from bytescale_ext.plan.memory.placement import liveness_bound
from bytescale_ext.plan.memory.step_file import StepMemory
from megatron.bytescale.runtime import Runtime
from megatron.bytescale.training.build import Training

TOLERANCE = 1.05
"""The report warns of a step that uses more than this many times the plan."""


@dataclass
class PlannedMemory:
    """A memory plan in one process, from its first forward pass on.

    Attributes:
        memory: the plan.
        store: of the activations.
        on_cuda: the process computes on a GPU.
        prints: this process prints the report.
    """

    memory: StepMemory
    store: ActivationStore
    on_cuda: bool
    prints: bool
    _trace: AllocationTrace | None = field(default=None, init=False)
    _used_before: int = field(default=0, init=False)
    _is_done: bool = field(default=False, init=False)

    @classmethod
    def of(cls, runtime: Runtime) -> PlannedMemory:
        """Return the plan of a run, before its first step."""
        store, process = runtime.activations, runtime.run.process
        assert store is not None, "a memory plan has an activation policy"
        return cls(runtime.run.get(StepMemory), store, process.on_cuda, prints=process.rank == 0)

    def around(self, training: Training) -> Training:
        """Return the training whose first forward pass reserves the memory."""

        def wrap_forward(forward_step: Callable[..., Any]) -> Callable[..., Any]:
            def forward(data_iterator: Any, model: Any) -> Any:
                if model.training:
                    self.begin(model)
                return forward_step(data_iterator, model)

            return forward

        def wrap_finalize(finalize: Callable[..., Any]) -> Callable[..., Any]:
            def finalize_and_compare(*args: Any, **kwargs: Any) -> Any:
                self.end()
                return finalize(*args, **kwargs)

            return finalize_and_compare

        return training.wrap_finalize(wrap_finalize).wrap_forward_step(wrap_forward)

    @property
    def peak(self) -> int:
        """Planned bytes."""
        return self.memory.plan.model.peak

    def begin(self, model: torch.nn.Module) -> None:
        """Reserve the planned memory and start measuring, in the first forward pass of a run."""
        if self._is_done or self._trace is not None or self._used_before:
            return
        device = torch.device("cuda", torch.cuda.current_device()) if self.on_cuda else torch.device("cpu")
        if self.on_cuda:
            torch.cuda.reset_peak_memory_stats()
            self._used_before = max(1, torch.cuda.memory_allocated())
            reserve(self.peak, device)
        if self.memory.buffer_bytes:
            self.store.buffers = RoundingBuffers(self.memory.buffer_bytes, device)
        if not self.on_cuda:
            self._trace = AllocationTrace([*_states(model), self.store.link.arena.memory])
            self._trace.__enter__()

    def end(self) -> None:
        """Compare the memory of the first step with the plan, after its last backward pass."""
        if self._is_done:
            return
        self._is_done = True
        if self._trace is not None:
            self._trace.__exit__(None, None, None)
            used = liveness_bound(self._trace.requests())
            self._trace = None
        else:
            used = torch.cuda.max_memory_allocated() - self._used_before
        if self.prints:
            print(self.report(used), flush=True)

    def report(self, used: int) -> str:
        """Return one line that compares the bytes of the first step with the plan."""
        # A buffer is freed whole at the end of its layer; the plan frees its tensors one by one.
        most = TOLERANCE * self.peak + NUM_BUFFERS * self.memory.buffer_bytes
        verdict = "" if used <= most else "; this is more: record the plan with longer micro-batches"
        where = "" if self.on_cuda else "; on CPU nothing is reserved, rounding buffers are used"
        return (
            f"> bytescale: memory plan: {self.peak / 1e6:.3f} MB planned, {used / 1e6:.3f} MB at most in the first step"
            f"{verdict}{where}"
        )


def _states(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return parameters and gradients, which exist before a step."""
    found: list[torch.Tensor] = []
    for parameter in model.parameters():
        grads: list[Any] = [getattr(parameter, "main_grad", None), parameter.grad]
        found += [parameter.detach(), *(grad for grad in grads if grad is not None)]
    return found
