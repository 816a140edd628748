"""Rounding buffers: device memory into which swapped layers are read back in turn (MEMO section 4.1).

While a layer in one buffer runs its backward pass, the layer before it is read into the other. Without buffers the
caching allocator finds new memory for every tensor of every layer. Buffers are allocated when a layer is read back and
released when the next micro-batch starts, because its forward pass needs the memory.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from typing import Protocol

import torch

from bytescale_ext.activation.arena import ALIGNMENT

NUM_BUFFERS = 2


class Holder(Protocol):
    """The user of a buffer."""

    @property
    def is_waiting(self) -> bool:
        """Whether the buffer is still in use."""
        ...


class RoundingBuffers:
    """Two buffers of ``num_bytes`` each.

    A buffer is free again when autograd has asked for all tensors of its layer. That is safe: the next user is another
    layer's backward pass, and its copies wait for all work queued on the compute stream.

    Attributes:
        num_taken, num_refused: how often ``take`` found a buffer, and how often none was free or large enough.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.num_bytes = num_bytes
        self.num_taken = 0
        self.num_refused = 0
        self._device = device
        self._buffers: list[torch.Tensor | None] = [None] * NUM_BUFFERS
        self._holders: list[weakref.ref[Holder] | None] = [None] * NUM_BUFFERS

    @staticmethod
    def bytes_of(sizes: Sequence[int]) -> int:
        """Return the bytes of a buffer for parts of these sizes."""
        return sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)

    def take(self, holder: Holder, sizes: Sequence[int]) -> list[torch.Tensor] | None:
        """Return parts [size] of these sizes, uint8, of a free buffer; None if no buffer is free or large enough."""
        if not sizes:
            return []
        for index in range(NUM_BUFFERS):
            if self._is_free(index) and self.bytes_of(sizes) <= self.num_bytes:
                self._holders[index] = weakref.ref(holder)
                self.num_taken += 1
                buffer = self._buffers[index]
                if buffer is None:
                    buffer = torch.empty(self.num_bytes, dtype=torch.uint8, device=self._device)
                    self._buffers[index] = buffer
                return self._parts(buffer, sizes)
        self.num_refused += 1
        return None

    def release(self) -> None:
        """Release unused buffers; call it while no backward pass runs."""
        for index in range(NUM_BUFFERS):
            if self._is_free(index):
                self._buffers[index] = None

    def _is_free(self, index: int) -> bool:
        held = self._holders[index]
        holder = held() if held is not None else None
        return holder is None or not holder.is_waiting

    def _parts(self, buffer: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
        parts, start = [], 0
        for size in sizes:
            parts.append(buffer[start : start + size])
            start += self.bytes_of([size])
        return parts


def reserve(num_bytes: int, device: torch.device) -> None:
    """Make the caching allocator hold one free segment of ``num_bytes``; warn if the device has no room for it."""
    if num_bytes <= 0:
        return
    try:
        torch.empty(num_bytes, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        warnings.warn(f"{num_bytes / 1e9:.4g} GB of the memory plan could not be reserved at once", stacklevel=2)
