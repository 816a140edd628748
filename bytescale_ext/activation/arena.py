"""Host memory for swapped activations: an arena of fixed size, handed out in parts.

The memory is allocated once and never grows. On machines with a GPU it is pinned by registration with CUDA, because
torch's own pinned allocator rounds sizes up to a power of two and could waste half of a large budget.
"""

from __future__ import annotations

import bisect
import contextlib
import math
import mmap
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

ALIGNMENT = 256
"""Alignment of parts in bytes. It suits every element type and lets copies run at full speed."""

SMALLEST_ARENA = 1 << 20

MOST_VIEWS = 4096
"""Number of views of an arena that are kept for reuse: layers of equal shapes take the same parts in each step."""


@dataclass(frozen=True)
class ArenaPart:
    """A part of the arena: ``num_bytes`` bytes from byte ``start`` on, both multiples of ``ALIGNMENT``."""

    start: int
    num_bytes: int


class HostArena:
    """Best-fit allocator of parts of a fixed piece of host memory. Adjacent free parts are joined.

    Attributes:
        memory: the host memory [n], uint8.
        used_bytes: bytes that are handed out at present.
        peak_bytes: largest value of ``used_bytes`` so far.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.used_bytes = 0
        self.peak_bytes = 0
        size = memory.numel() // ALIGNMENT * ALIGNMENT
        self._typed: dict[torch.dtype, torch.Tensor] = {}  # the memory, as elements of a type
        self._views: dict[tuple[int, tuple[int, ...], torch.dtype], torch.Tensor] = {}
        self._starts = [0] if size else []  # starts of the free parts, ascending
        self._sizes = [size] if size else []

    @property
    def num_bytes(self) -> int:
        """Size of the whole arena."""
        return self.memory.numel()

    def take(self, num_bytes: int) -> ArenaPart | None:
        """Hand out a part of at least ``num_bytes``. Return None if no free part is large enough."""
        needed = -(-max(num_bytes, 1) // ALIGNMENT) * ALIGNMENT
        fitting = [(size, index) for index, size in enumerate(self._sizes) if size >= needed]
        if not fitting:
            return None
        size, index = min(fitting)
        part = ArenaPart(self._starts[index], needed)
        if size == needed:
            del self._starts[index], self._sizes[index]
        else:
            self._starts[index] += needed
            self._sizes[index] -= needed
        self.used_bytes += needed
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return part

    def give_back(self, part: ArenaPart) -> None:
        """Free a part, which must not have been given back before."""
        index = bisect.bisect_left(self._starts, part.start)
        after = self._starts[index] if index < len(self._starts) else self.num_bytes
        before = self._starts[index - 1] + self._sizes[index - 1] if index else 0
        assert before <= part.start and part.start + part.num_bytes <= after, f"{part=} {before=} {after=}"
        self.used_bytes -= part.num_bytes
        self._starts.insert(index, part.start)
        self._sizes.insert(index, part.num_bytes)
        self._join(index)
        if index:
            self._join(index - 1)

    def _join(self, index: int) -> None:
        """Join a free part with the next free part if they are adjacent."""
        if index + 1 < len(self._starts) and self._starts[index] + self._sizes[index] == self._starts[index + 1]:
            self._sizes[index] += self._sizes[index + 1]
            del self._starts[index + 1], self._sizes[index + 1]

    def view(self, part: ArenaPart, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of any shape in a part, which must have enough bytes."""
        count = math.prod(shape)
        assert count * dtype.itemsize <= part.num_bytes, f"{shape=} {dtype=} {part=}"
        key = part.start, shape, dtype
        known = self._views.get(key)
        if known is not None:
            return known
        if len(self._views) >= MOST_VIEWS:
            self._views.clear()
        if dtype not in self._typed:
            self._typed[dtype] = self.memory[: self.num_bytes // ALIGNMENT * ALIGNMENT].view(dtype)
        start = part.start // dtype.itemsize
        self._views[key] = self._typed[dtype][start : start + count].view(shape)
        return self._views[key]


def allocate_arena(num_bytes: int, pinned: bool, allocate: Callable[[int], torch.Tensor] | None = None) -> HostArena:
    """Allocate an arena of ``num_bytes``. If that fails, warn and halve the size until the allocation succeeds.

    Args:
        num_bytes: size of the arena; an arena of 0 bytes hands out nothing.
        pinned: whether to pin the memory, so that copies overlap with computation.
        allocate: function that returns the memory [n], uint8, or raises RuntimeError; by default torch's allocator, and
            CUDA for pinned memory.
    """
    allocate = allocate or partial(host_bytes, pinned=pinned)
    size = num_bytes
    while size:
        try:
            memory = allocate(size)
        except (RuntimeError, MemoryError):
            size = size // 2 if size // 2 >= SMALLEST_ARENA else 0
            continue
        break
    if size < num_bytes:
        warnings.warn(
            f"{num_bytes / 1e9:.4g} GB of {'pinned ' if pinned else ''}host memory for activations is not available; "
            f"continuing with {size / 1e9:.4g} GB: the rest stays on the device",
            stacklevel=2,
        )
    return HostArena(memory if size else torch.empty(0, dtype=torch.uint8))


def host_bytes(num_bytes: int, pinned: bool) -> torch.Tensor:
    """Return host memory [num_bytes], uint8, whose values are undefined. Raises RuntimeError if there is too little."""
    return pinned_block(num_bytes) if pinned else torch.empty(num_bytes, dtype=torch.uint8)


class PinnedBlock(mmap.mmap):
    """Pages of host memory that are registered with CUDA until no tensor uses them.

    CUDA must forget the pages before the system gives their addresses to another block. Otherwise the registration of
    that block fails (error 712, cudaErrorHostMemoryAlreadyRegistered).
    """

    unregister: Callable[[], object] | None = None

    def __del__(self) -> None:
        if self.unregister is not None:
            self.unregister()


def pinned_block(num_bytes: int, descriptor: int | None = None) -> torch.Tensor:
    """Return zeros [num_bytes], uint8, in pinned host memory. Raises RuntimeError if CUDA refuses.

    ``descriptor``: an open file with these bytes, which processes share; None: memory of this process.
    """
    if not num_bytes:
        return torch.empty(0, dtype=torch.uint8)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS if descriptor is None else mmap.MAP_SHARED
    pages = PinnedBlock(-1 if descriptor is None else descriptor, num_bytes, flags)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    pin(memory)
    pages.unregister = partial(_unregister, torch.cuda.cudart().cudaHostUnregister, memory.data_ptr(), os.getpid())
    return memory


def _unregister(unregister: Callable[[int], object], address: int, process: int) -> None:
    """Make pages pageable again, in the process that has registered them."""
    if os.getpid() == process:
        unregister(address)


def pin(memory: torch.Tensor) -> None:
    """Pin host memory [n], uint8. Raises RuntimeError if CUDA refuses, and leaves CUDA in a working state.

    CUDA keeps an error until torch reads it after its next kernel. So this function runs a kernel after a failure.
    """
    error = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
    if int(error) != 0:
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")
        raise RuntimeError(f"cudaHostRegister of {memory.numel()} bytes: error {int(error)}")
