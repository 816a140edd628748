"""Measures the most device memory that a process needs in one step, model states and activations together."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import torch

from bytescale_ext.activation.trace import AllocationTrace
from bytescale_ext.data.samples.packed import PackedMicroBatch
from bytescale_ext.plan.memory.placement import liveness_bound


@dataclass
class PeakMeter:
    """Measures one step at a time: on a GPU by torch's allocator, on CPU by the storages of tensors, which is slow."""

    _on_cuda: bool = False
    _held: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    _trace: AllocationTrace | None = None
    _runs: bool = False

    def begin(self, on_cuda: bool, host: Sequence[torch.Tensor] = ()) -> None:
        """Start to measure, before the first forward pass.

        Args:
            on_cuda: the process computes on a GPU.
            host: tensors of any shape that are host memory; on CPU they do not count, nor do loaded micro-batches.
        """
        self._on_cuda, self._runs = on_cuda, True
        if on_cuda:
            torch.cuda.reset_peak_memory_stats()
            return
        existing = existing_tensors()
        self._held = {one._cdata: one for one in (tensor.untyped_storage() for tensor in existing)}
        for tensor in (*host, *loaded_tensors()):
            self._held.pop(tensor.untyped_storage()._cdata, None)
        self._trace = AllocationTrace([*existing, *host])
        self._trace.__enter__()  # type: ignore[no-untyped-call]  # torch's, without annotations

    def end(self) -> float:
        """Return the most bytes since ``begin``, after the last backward pass; 0 if nothing is measured."""
        if not self._runs:
            return 0.0
        self._runs = False
        if self._on_cuda:
            return float(torch.cuda.max_memory_allocated())
        trace, held, self._trace, self._held = self._trace, self._held, None, {}
        assert trace is not None, "begin was called"
        trace.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch's, without annotations
        return float(sum(one.nbytes() for one in held.values()) + liveness_bound(trace.requests()))


def existing_tensors() -> list[torch.Tensor]:
    """Return the tensors on CPU that Python knows, of all shapes."""
    found = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]
    return [one for one in found if one.device.type == "cpu" and one.layout == torch.strided]


def loaded_tensors() -> list[torch.Tensor]:
    """Return the tensors, of all shapes, of micro-batches that a loader has made: of this step and of steps ahead."""
    loaded = [one for one in gc.get_objects() if issubclass(type(one), PackedMicroBatch)]
    values = [getattr(one, entry.name) for one in loaded for entry in fields(one)]
    return [value for value in values if isinstance(value, torch.Tensor)]
