"""Rounding buffers: two pieces of device memory that swapped layers are read back into (MEMO section 4.1).

The layers alternate: while the layer in one buffer runs its backward pass, the layer below it is read into the other
buffer. Without buffers the caching allocator would have to find new memory for every tensor of every layer. A buffer is
allocated when a layer is read back. It is released when the next micro-batch starts, because the forward pass needs the
memory.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from typing import Protocol

import torch

from bytescale_ext.activation.arena import ALIGNMENT

NUM_BUFFERS = 2


class BufferUser(Protocol):
    """The owner of the tensors in a buffer."""

    @property
    def is_waiting(self) -> bool:
        """Whether any tensor in the buffer is still needed."""
        ...


class RoundingBuffers:
    """Two buffers of ``num_bytes`` each.

    A buffer is free again once autograd has asked for all tensors of its layer. Reusing it then is safe: the copies of
    the next user wait for all work in the queue of the compute stream.

    Attributes:
        num_bytes: size of a buffer.
        num_taken: number of calls of ``take`` that found a buffer.
        num_refused: number of calls of ``take`` that found no free buffer of sufficient size.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.num_bytes = num_bytes
        self.num_taken = 0
        self.num_refused = 0
        self._device = device
        self._buffers: list[torch.Tensor | None] = [None] * NUM_BUFFERS
        self._users: list[weakref.ref[BufferUser] | None] = [None] * NUM_BUFFERS

    @staticmethod
    def bytes_of(sizes: Sequence[int]) -> int:
        """Return the buffer size, in bytes, that fits parts of the given sizes."""
        return sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)

    def take(self, user: BufferUser, sizes: Sequence[int]) -> list[torch.Tensor] | None:
        """Return parts of a free buffer, one [size] of uint8 per size; None if no buffer is free or large enough."""
        if not sizes:
            return []
        for index in range(NUM_BUFFERS):
            if self._is_free(index) and self.bytes_of(sizes) <= self.num_bytes:
                self._users[index] = weakref.ref(user)
                self.num_taken += 1
                buffer = self._buffers[index]
                if buffer is None:
                    buffer = torch.empty(self.num_bytes, dtype=torch.uint8, device=self._device)
                    self._buffers[index] = buffer
                return self._parts(buffer, sizes)
        self.num_refused += 1
        return None

    def release(self) -> None:
        """Release unused buffers. Must not be called during a backward pass."""
        for index in range(NUM_BUFFERS):
            if self._is_free(index):
                self._buffers[index] = None

    def _is_free(self, index: int) -> bool:
        reference = self._users[index]
        user = reference() if reference is not None else None
        return user is None or not user.is_waiting

    def _parts(self, buffer: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
        parts, start = [], 0
        for size in sizes:
            parts.append(buffer[start : start + size])
            start += self.bytes_of([size])
        return parts


def reserve(num_bytes: int, device: torch.device) -> None:
    """Make the caching allocator reserve one segment of ``num_bytes``, or warn if the device has too little memory."""
    if num_bytes <= 0:
        return
    try:
        torch.empty(num_bytes, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        warnings.warn(f"{num_bytes / 1e9:.4g} GB for the memory plan could not be reserved in one piece", stacklevel=2)
