"""``--memory-plan FILE``: a plan of ``bytescale memory-plan`` in training: checked, put to work, held against a step.

What pays is put to work: swapped layers come back to two rounding buffers of the planned size; and on a GPU the planned
peak is reserved as one segment of the caching allocator before the first step, which then splits it instead of asking
the device for memory in the order in which tensors appear. The addresses of the plan are not enforced: an allocator
behind torch sees sizes and an order that changes with the lengths of micro-batches, so the n-th request of a step is
not the n-th of the plan.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bytescale_ext.activation.buffers import NUM_BUFFERS, RoundingBuffers, reserve
from bytescale_ext.activation.store import ActivationStore
from bytescale_ext.activation.trace import AllocationTrace
from bytescale_ext.plan.activation import ActivationPlan
from bytescale_ext.plan.memory import liveness_bound
from bytescale_ext.plan.memory_step import StepMemory, StepRecord
from megatron.bytescale.training import seq1f1b

TOLERANCE = 1.05
"""A step may use so much more than planned before it is said."""


def read_memory_plan(args: argparse.Namespace, num_tokens: int, activations: ActivationPlan) -> StepMemory:
    """The plan of ``--memory-plan`` for a run with micro-batches of up to ``num_tokens``.

    Raises:
        ValueError: it cannot be read, is no plan, or one of another model, or the run is cut over several processes.
    """
    from megatron.bytescale.runtime import model_shape  # imports Megatron, and flags are added before that

    path: Path = args.memory_plan
    cut = {
        "--tensor-model-parallel-size": args.tensor_model_parallel_size > 1,
        "--pipeline-model-parallel-size": args.pipeline_model_parallel_size > 1,
        "--seq1f1b-splits": seq1f1b.is_on(args),
    }
    for flag, is_cut in cut.items():
        if is_cut:
            raise ValueError(f"--memory-plan does not work with {flag}: a plan is of the whole model in one process")
    try:
        memory = StepMemory.from_json(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ValueError(f"--memory-plan {path} cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise ValueError(f"--memory-plan {path}: {error}") from None
    dtype = str(args.params_dtype).removeprefix("torch.")
    step = StepRecord(model_shape(args), num_tokens, dtype, args.chunked_cross_entropy, activations)
    memory.check_serves(step, path)
    return memory


@dataclass
class PlannedMemory:
    """A memory plan at work in one process, from its first forward pass on.

    Attributes:
        memory: the plan.
        store: of the activations.
        on_cuda: whether memory is a GPU's.
        says: whether this process prints.
    """

    memory: StepMemory
    store: ActivationStore
    on_cuda: bool
    says: bool
    _trace: AllocationTrace | None = field(default=None, init=False)
    _used_before: int = field(default=0, init=False)
    _is_done: bool = field(default=False, init=False)

    @property
    def peak(self) -> int:
        """Bytes that are planned."""
        return self.memory.plan.model.peak

    def begin(self, model: torch.nn.Module) -> None:
        """Before each forward pass; only the first of a run takes memory and begins to watch."""
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
        """After the last backward pass of each step; the first one's memory is held against the plan."""
        if self._is_done:
            return
        self._is_done = True
        if self._trace is not None:
            self._trace.__exit__(None, None, None)
            used = liveness_bound(self._trace.requests())
            self._trace = None
        else:
            used = torch.cuda.max_memory_allocated() - self._used_before
        if self.says:
            print(self.report(used), flush=True)

    def report(self, used: int) -> str:
        """What the first step used of what was planned, in one line."""
        # A buffer stays whole to the end of its layer, where the plan's tensors go one by one.
        most = TOLERANCE * self.peak + NUM_BUFFERS * self.memory.buffer_bytes
        verdict = "" if used <= most else "; this is more: record the plan with longer micro-batches"
        where = "" if self.on_cuda else "; on CPU nothing is reserved, rounding buffers are used"
        return (
            f"> bytescale: memory plan: {self.peak / 1e6:.3f} MB planned, {used / 1e6:.3f} MB at most in the first step"
            f"{verdict}{where}"
        )


def _states(model: torch.nn.Module) -> list[torch.Tensor]:
    """Parameters and gradients, which are there before a step."""
    found: list[torch.Tensor] = []
    for parameter in model.parameters():
        grads: list[Any] = [getattr(parameter, "main_grad", None), parameter.grad]
        found += [parameter.detach(), *(grad for grad in grads if grad is not None)]
    return found
