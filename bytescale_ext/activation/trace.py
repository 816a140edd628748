"""Trace of allocations and frees of tensors on any device, the input of a memory plan (MEMO section 4.3.2)."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bytescale_ext.plan.memory.passes import Pass
from bytescale_ext.plan.memory.plan import Request

GRANULE_BYTES = 512
"""Granularity of torch's caching allocator, which rounds every allocation up to a multiple."""


@dataclass
class _Allocation:
    """A traced storage; ``stop`` is None until it is freed."""

    name: str
    num_bytes: int
    start: int
    stop: int | None = None


class AllocationTrace(TorchDispatchMode):
    """A torch mode that records the lifetime of every new storage that an operator returns.

    Memory that an operator uses only inside is not recorded.

    Args:
        ignored: tensors that existed before the trace and are not recorded.

    Attributes:
        passes: passes of the layers under ``watch_passes``.
    """

    def __init__(self, ignored: list[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's, without annotations
        self.passes: list[Pass] = []
        self._running: tuple[str, int, int] | None = None  # kind, layer and start of the running pass
        self._time = 0
        self._allocations: list[_Allocation] = []
        self._alive: dict[int, _Allocation] = {}  # by the address of the storage object
        self._ignored = {tensor.untyped_storage()._cdata for tensor in ignored}

    def __torch_dispatch__(
        self, func: Callable[..., object], types: object, args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:  # fmt: skip
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._note(str(func), leaf.untyped_storage())
        return result

    def _note(self, name: str, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._alive or key in self._ignored or not storage.nbytes():
            return
        size = -(-storage.nbytes() // GRANULE_BYTES) * GRANULE_BYTES
        self._alive[key] = _Allocation(f"{len(self._allocations)} {name}", size, self._time)
        self._allocations.append(self._alive[key])
        self._time += 1
        weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        allocation = self._alive.pop(key, None)
        if allocation is not None:
            allocation.stop = self._time
            self._time += 1

    def begin_pass(self, kind: str, layer: int) -> None:
        """Record the start of a layer's pass, which also ends the previous pass if it is still running."""
        self._close()
        self._running = (kind, layer, self._time)
        self._time += 1

    def end_pass(self, kind: str, layer: int) -> None:
        """Record the end of a pass, unless another pass has begun."""
        if self._running is not None and self._running[:2] == (kind, layer):
            self._close()

    def _close(self) -> None:
        if self._running is not None:
            self.passes.append(Pass(*self._running, self._time))
            self._running = None
            self._time += 1

    def note_input(self, tensor: torch.Tensor) -> None:
        """Record a tensor of any shape that was received just before the trace began."""
        self._note("received", tensor.untyped_storage())

    def requests(self) -> list[Request]:
        """Return all allocations in order as requests. An allocation that is still alive ends now."""
        end = self._time + 1
        return [
            Request(entry.name, entry.num_bytes, entry.start, end if entry.stop is None else entry.stop)
            for entry in self._allocations
        ]


def watch_passes(layer: torch.nn.Module, number: int, running: Callable[[], AllocationTrace | None]) -> None:
    """Record the passes of a layer in the running trace, with hooks on the module and on gradients.

    Args:
        layer: module that maps hidden states [s, b, h] to hidden states, or to a tuple that starts with them.
        number: number of the layer.
        running: function that returns the running trace, or None.
    """
    inputs: list[torch.Tensor] = []

    def begin(_: torch.nn.Module, args: tuple[torch.Tensor, ...], kwargs: dict[str, torch.Tensor]) -> None:
        trace = running()
        if trace is not None:
            inputs.append(args[0] if args else kwargs["hidden_states"])
            trace.begin_pass("forward", number)

    def end(_: torch.nn.Module, args: object, output: torch.Tensor | tuple[torch.Tensor, ...]) -> None:
        trace = running()
        if trace is None or not inputs:
            return
        trace.end_pass("forward", number)
        hidden, result = inputs.pop(), output if isinstance(output, torch.Tensor) else output[0]
        if hidden.requires_grad and result.requires_grad:
            result.register_hook(lambda _: trace.begin_pass("backward", number))
            hidden.register_hook(lambda _: trace.end_pass("backward", number))

    layer.register_forward_pre_hook(begin, with_kwargs=True)
    layer.register_forward_hook(end)
