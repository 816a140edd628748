"""Peak device memory of a process in one step, including model states and activations."""

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
    """Measures the peak memory of a step: from torch's allocator on a GPU, from tensor storages (slowly) on CPU."""

    _on_cuda: bool = False
    _storages: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    _trace: AllocationTrace | None = None
    _runs: bool = False

    def begin(self, on_cuda: bool, host: Sequence[torch.Tensor] = ()) -> None:
        """Start measuring; call it before the first forward pass.

        Args:
            on_cuda: whether the process computes on a GPU.
            host: tensors of any shape that stand for host memory. On CPU they are not counted; neither are loaded
                micro-batches.
        """
        self._on_cuda, self._runs = on_cuda, True
        if on_cuda:
            torch.cuda.reset_peak_memory_stats()
            return
        existing = existing_tensors()
        self._storages = {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in existing)}
        for tensor in (*host, *loaded_tensors()):
            self._storages.pop(tensor.untyped_storage()._cdata, None)
        self._trace = AllocationTrace([*existing, *host])
        self._trace.__enter__()  # type: ignore[no-untyped-call]  # torch's, without annotations

    def end(self) -> float:
        """Return the peak bytes since ``begin``, or 0 without a ``begin``; call it after the last backward pass."""
        if not self._runs:
            return 0.0
        self._runs = False
        if self._on_cuda:
            return float(torch.cuda.max_memory_allocated())
        trace, storages, self._trace, self._storages = self._trace, self._storages, None, {}
        assert trace is not None, "begin was called"
        trace.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch's, without annotations
        return float(sum(storage.nbytes() for storage in storages.values()) + liveness_bound(trace.requests()))


def existing_tensors() -> list[torch.Tensor]:
    """Return all CPU tensors, of any shape, that Python's garbage collector tracks."""
    return [
        tensor
        for tensor in tracked_objects(torch.Tensor)
        if tensor.device.type == "cpu" and tensor.layout == torch.strided
    ]


def loaded_tensors() -> list[torch.Tensor]:
    """Return the tensors, of any shape, of all loaded micro-batches, including the micro-batches of later steps."""
    loaded = tracked_objects(PackedMicroBatch)
    values = [getattr(micro_batch, entry.name) for micro_batch in loaded for entry in fields(micro_batch)]
    return [value for value in values if isinstance(value, torch.Tensor)]


def tracked_objects[Kind](kind: type[Kind]) -> list[Kind]:
    """Return all instances of a class and of its subclasses that Python's garbage collector tracks.

    Looks only at objects that refer to these classes, as instances do. ``gc.get_objects`` would refer to every object:
    CPython raises SystemError in another thread if anything refers to a tuple that this thread has not completed.
    """
    kinds = _with_subclasses(kind)
    return [value for value in gc.get_referrers(*kinds) if type(value) in kinds]


def _with_subclasses(kind: type) -> set[type]:
    """Return a class and its subclasses."""
    subclasses: list[type] = type.__subclasses__(kind)
    return {kind}.union(*map(_with_subclasses, subclasses))
