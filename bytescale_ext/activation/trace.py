"""Records when tensors are allocated and freed, on any device: the input of a memory plan (MEMO section 4.3.2)."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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
    """

    def __init__(self, ignored: list[torch.Tensor]) -> None:
        super().__init__()
        self.marks: dict[str, int] = {}
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

    def mark(self, name: str) -> None:
        """Record the current time under a name."""
        self.marks[name] = self._time
        self._time += 1

    def requests(self) -> list[Request]:
        """Return all requests in order; requests that were not freed end now."""
        end = self._time + 1
        return [
            Request(block.name, block.num_bytes, block.start, end if block.stop is None else block.stop)
            for block in self._blocks
        ]
