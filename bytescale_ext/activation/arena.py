"""Host memory for swapped activations: one block of fixed size, handed out in parts.

The block is allocated once and never grows. With a GPU it is pinned by registration, because torch's own pinned
allocator rounds each block up to a power of two and could waste half of a large budget.
"""

from __future__ import annotations

import bisect
import contextlib
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch

ALIGNMENT = 256
"""Bytes. Parts start at multiples of this, so that any element type fits and copies run at full speed."""

SMALLEST_ARENA = 1 << 20


@dataclass(frozen=True)
class Block:
    """A part of the arena: ``num_bytes`` (a multiple of ``ALIGNMENT``) from ``start`` on."""

    start: int
    num_bytes: int


class HostArena:
    """Sub-allocates one block of host memory by best fit; free neighbours are joined.

    Attributes:
        memory: the block [n], uint8.
        used_bytes: handed out now.
        peak_bytes: the most handed out at one time.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.used_bytes = 0
        self.peak_bytes = 0
        size = memory.numel() // ALIGNMENT * ALIGNMENT
        self._starts = [0] if size else []  # of the free parts, ascending
        self._sizes = [size] if size else []

    @property
    def num_bytes(self) -> int:
        """Size of the whole block."""
        return self.memory.numel()

    def take(self, num_bytes: int) -> Block | None:
        """Hand out a part of at least ``num_bytes``; None if no free part is large enough."""
        needed = -(-max(num_bytes, 1) // ALIGNMENT) * ALIGNMENT
        fitting = [(size, index) for index, size in enumerate(self._sizes) if size >= needed]
        if not fitting:
            return None
        size, index = min(fitting)
        block = Block(self._starts[index], needed)
        if size == needed:
            del self._starts[index], self._sizes[index]
        else:
            self._starts[index] += needed
            self._sizes[index] -= needed
        self.used_bytes += needed
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return block

    def give_back(self, block: Block) -> None:
        """Free a part. Each part is given back once."""
        index = bisect.bisect_left(self._starts, block.start)
        after = self._starts[index] if index < len(self._starts) else self.num_bytes
        before = self._starts[index - 1] + self._sizes[index - 1] if index else 0
        assert before <= block.start and block.start + block.num_bytes <= after, f"{block=} {before=} {after=}"
        self.used_bytes -= block.num_bytes
        self._starts.insert(index, block.start)
        self._sizes.insert(index, block.num_bytes)
        self._join(index)
        if index:
            self._join(index - 1)

    def _join(self, index: int) -> None:
        """Join a free part and the next one if they touch."""
        if index + 1 < len(self._starts) and self._starts[index] + self._sizes[index] == self._starts[index + 1]:
            self._sizes[index] += self._sizes[index + 1]
            del self._starts[index + 1], self._sizes[index + 1]

    def view(self, block: Block, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a part as a tensor; ``shape`` may need fewer bytes than the part has."""
        num_bytes = math.prod(shape) * dtype.itemsize
        assert num_bytes <= block.num_bytes, f"{shape=} {dtype=} {block=}"
        return self.memory[block.start : block.start + num_bytes].view(dtype).view(shape)


def allocate_arena(num_bytes: int, pinned: bool, allocate: Callable[[int], torch.Tensor] | None = None) -> HostArena:
    """Allocate an arena of ``num_bytes``; halve the size, with a warning, until the allocation succeeds.

    Args:
        num_bytes: the budget; an arena of 0 bytes hands out nothing.
        pinned: register it with CUDA, so that copies run beside computing.
        allocate: returns the memory [n], uint8, or raises RuntimeError; None: torch and CUDA.
    """
    allocate = allocate or (_pinned_memory if pinned else _plain_memory)
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
            f"{num_bytes / 1e9:.4g} GB of {'pinned ' if pinned else ''}host memory for activations is not free; "
            f"continuing with {size / 1e9:.4g} GB: the rest stays on the device",
            stacklevel=2,
        )
    return HostArena(memory if size else torch.empty(0, dtype=torch.uint8))


def _plain_memory(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8)


def _pinned_memory(num_bytes: int) -> torch.Tensor:
    memory = torch.empty(num_bytes, dtype=torch.uint8)
    register(memory)
    return memory


def register(memory: torch.Tensor) -> None:
    """Pin memory [n], uint8. Raises RuntimeError where CUDA refuses; CUDA works on as before.

    CUDA keeps the error until it is asked for, and torch asks after its next kernel: this one.
    """
    error = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
    if int(error) != 0:
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")
        raise RuntimeError(f"cudaHostRegister of {memory.numel()} bytes: error {int(error)}")
