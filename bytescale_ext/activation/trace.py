"""Records when tensors are allocated and freed, on any device: the input of a memory plan (MEMO section 4.3.2)."""

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
"""Torch's caching allocator rounds every block up to a multiple of this."""


@dataclass
class _Block:
    """A storage; ``stop`` is None until it is freed."""

    name: str
    num_bytes: int
    start: int
    stop: int | None = None


class AllocationTrace(TorchDispatchMode):
    """While entered, records every new storage that an operator returns as a request, until it is freed.

    Workspace inside an operator is not recorded. ``ignored``: tensors that existed before; they are not recorded.

    Attributes:
        passes: of the layers under ``watch_passes``.
    """

    def __init__(self, ignored: list[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's, without annotations
        self.passes: list[Pass] = []
        self._open: tuple[str, int, int] | None = None  # kind, layer and start of the running pass
        self._time = 0
        self._blocks: list[_Block] = []
        self._alive: dict[int, _Block] = {}  # by address of the storage object
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
        self._alive[key] = _Block(f"{len(self._blocks)} {name}", size, self._time)
        self._blocks.append(self._alive[key])
        self._time += 1
        weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        block = self._alive.pop(key, None)
        if block is not None:
            block.stop = self._time
            self._time += 1

    def begin_pass(self, kind: str, layer: int) -> None:
        """Record that a pass of a layer begins; the pass before it ends at the latest here."""
        self._close()
        self._open = (kind, layer, self._time)
        self._time += 1

    def end_pass(self, kind: str, layer: int) -> None:
        """Record that a pass ends, unless another one has begun."""
        if self._open is not None and self._open[:2] == (kind, layer):
            self._close()

    def _close(self) -> None:
        if self._open is not None:
            self.passes.append(Pass(*self._open, self._time))
            self._open = None
            self._time += 1

    def note_input(self, tensor: torch.Tensor) -> None:
        """Record a tensor of any shape that was received just before the trace began."""
        self._note("received", tensor.untyped_storage())

    def requests(self) -> list[Request]:
        """Return all requests in order; requests that were not freed end now."""
        end = self._time + 1
        return [
            Request(block.name, block.num_bytes, block.start, end if block.stop is None else block.stop)
            for block in self._blocks
        ]


def watch_passes(layer: torch.nn.Module, number: int, running: Callable[[], AllocationTrace | None]) -> None:
    """Record the passes of a layer whenever a trace runs, by hooks on the module and on gradients.

    The layer maps hidden states [s, b, h] to hidden states, alone or first in a tuple. ``running`` returns the trace.
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
