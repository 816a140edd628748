"""Host memory of a page table: the planes of Adam's states, and the buffers of pages under way."""

from __future__ import annotations

from typing import Final

import torch

from bytescale_ext.activation.arena import ALIGNMENT, HostArena, register
from bytescale_ext.plan.states.pages import NUM_BUFFERS, PageTable

MOMENTS: Final = ("exp_avg", "exp_avg_sq")
"""Adam's states, by the names that torch gives them."""


class PageMemory:
    """Planes and buffers in one block of host memory, which is pinned for a GPU.

    Attributes:
        table: what lies where.
        arena: the memory, for a link to the device.
        moments: the planes [n] of Adam's moments, by their names in torch, float32.
        copies: the plane [n] of float32 parameters; shorter, because only the first pages have it.
        gradients, values: a page [n] for each buffer, float32.
    """

    def __init__(self, table: PageTable, pinned: bool) -> None:
        self.table = table
        memory = torch.empty(table.host_bytes + _PARTS * ALIGNMENT, dtype=torch.uint8)
        if pinned:
            register(memory)
        self.arena = HostArena(memory)
        self.moments = {name: self._take(len(table.pages)).zero_() for name in MOMENTS}
        self.copies = self._take(table.num_copies)
        self.gradients = [self._take(1) for _ in range(NUM_BUFFERS)]
        self.values = [self._take(1) for _ in range(NUM_BUFFERS)]

    def _take(self, num_pages: int) -> torch.Tensor:
        """Return pages [n] that lie end to end, float32."""
        block = self.arena.take(num_pages * self.table.page_bytes)
        assert block is not None, f"{num_pages=} {self.arena.used_bytes=} {self.arena.num_bytes=}"
        return self.arena.view(block, (num_pages * self.table.page_elements,), torch.float32)

    def of_tensor(self, plane: torch.Tensor, number: int, shape: torch.Size) -> torch.Tensor:
        """Return the part of a plane [n] that belongs to a tensor, in the tensor's shape."""
        start = self.table.starts[number]
        return plane[start : start + self.table.tensors[number].num_elements].view(shape)

    def of_page(self, plane: torch.Tensor, number: int) -> torch.Tensor:
        """Return the part [elements in use] of a plane [n] that belongs to a page."""
        start = number * self.table.page_elements
        return plane[start : start + self.table.pages[number].num_elements]


_PARTS: Final = len(MOMENTS) + 1 + 2 * NUM_BUFFERS  # each begins at a multiple of ``ALIGNMENT``
