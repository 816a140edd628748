"""Host memory of a page table: the planes of Adam's states, and the buffers of pages under way."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import torch

from bytescale_ext.activation.arena import ALIGNMENT, HostArena, pin
from bytescale_ext.plan.states.pages import NUM_BUFFERS, PageTable

MOMENTS: Final = ("exp_avg", "exp_avg_sq")
"""Adam's states, by the names that torch gives them."""


class PageMemory:
    """Planes and buffers in one block of host memory, which is pinned for a GPU.

    Attributes:
        table: what lies where.
        arena: the memory, for a link to the device.
        planes: float32 [n] each, those of the moments and of float32 parameters; without the pages left out.
        gradients, values: a page [n] for each buffer, float32.
    """

    def __init__(self, table: PageTable, pinned: bool, left_out: Collection[int] = ()) -> None:
        """``left_out``: pages that lie elsewhere."""
        self.table = table
        here = [number for number in range(len(table.pages)) if number not in left_out]
        counts = [*[len(here)] * len(MOMENTS), sum(number < table.num_copies for number in here)]
        num_pages = sum(counts) + 2 * NUM_BUFFERS
        memory = torch.empty(num_pages * table.page_bytes + _PARTS * ALIGNMENT, dtype=torch.uint8)
        if pinned:
            pin(memory)
        self.arena = HostArena(memory)
        self.planes = [self._take(count).zero_() for count in counts]
        self.gradients = [self._take(1) for _ in range(NUM_BUFFERS)]
        self.values = [self._take(1) for _ in range(NUM_BUFFERS)]
        self.places = {number: place for place, number in enumerate(here)}

    def _take(self, num_pages: int) -> torch.Tensor:
        """Return pages [n] that lie end to end, float32."""
        block = self.arena.take(num_pages * self.table.page_bytes)
        assert block is not None, f"{num_pages=} {self.arena.used_bytes=} {self.arena.num_bytes=}"
        return self.arena.view(block, (num_pages * self.table.page_elements,), torch.float32)

    def of_tensor(self, plane: int, number: int, shape: torch.Size) -> torch.Tensor:
        """Return the part of a plane that belongs to a tensor, in the tensor's shape, where no page is left out."""
        start = self.table.starts[number]
        return self.planes[plane][start : start + self.table.tensors[number].num_elements].view(shape)

    def whole_page(self, plane: int, number: int) -> torch.Tensor:
        """Return a page [page_elements] of a plane."""
        start = self.places[number] * self.table.page_elements
        return self.planes[plane][start : start + self.table.page_elements]

    def of_page(self, number: int) -> list[torch.Tensor]:
        """Return the moments and, where the page has one, the copy [elements in use] of a page."""
        page = self.table.pages[number]
        count = len(MOMENTS) + page.has_copy
        return [self.whole_page(plane, number)[: page.num_elements] for plane in range(count)]


COPIES: Final = len(MOMENTS)
"""Number of the plane of float32 parameters."""

_PARTS: Final = len(MOMENTS) + 1 + 2 * NUM_BUFFERS  # each begins at a multiple of ``ALIGNMENT``
