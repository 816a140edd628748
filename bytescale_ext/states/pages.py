"""Host memory of a page table: planes of Adam's states, and buffers of the pages that are being updated."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import torch

from bytescale_ext.activation.arena import ALIGNMENT, HostArena, host_bytes
from bytescale_ext.plan.states.pages import NUM_BUFFERS, PageTable

MOMENTS: Final = ("exp_avg", "exp_avg_sq")
"""Torch's names of Adam's states."""


class PageMemory:
    """Planes and buffers in one block of host memory.

    Attributes:
        table: contents of each page.
        arena: the block of memory, for a link to the device.
        planes: planes of the moments and of float32 parameters, float32 [n] each, without the excluded pages.
        gradients: gradients of a page, float32 [n], for each buffer.
        values: parameters of a page, float32 [n], for each buffer.
        places: position of each page in the planes, by number of the page.
    """

    def __init__(self, table: PageTable, pinned: bool, excluded: Collection[int] = ()) -> None:
        """Allocate the memory of a table, pinned for a GPU; ``excluded`` pages are stored elsewhere."""
        self.table = table
        included = [number for number in range(len(table.pages)) if number not in excluded]
        counts = [*[len(included)] * len(MOMENTS), sum(number < table.num_copies for number in included)]
        num_pages = sum(counts) + 2 * NUM_BUFFERS
        self.arena = HostArena(host_bytes(num_pages * table.page_bytes + _PARTS * ALIGNMENT, pinned))
        self.planes = [self._take(count).zero_() for count in counts]
        self.gradients = [self._take(1) for _ in range(NUM_BUFFERS)]
        self.values = [self._take(1) for _ in range(NUM_BUFFERS)]
        self.places = {number: place for place, number in enumerate(included)}

    def _take(self, num_pages: int) -> torch.Tensor:
        """Allocate contiguous pages, float32 [n]."""
        block = self.arena.take(num_pages * self.table.page_bytes)
        assert block is not None, f"{num_pages=} {self.arena.used_bytes=} {self.arena.num_bytes=}"
        return self.arena.view(block, (num_pages * self.table.page_elements,), torch.float32)

    def tensor_view(self, plane: int, number: int, shape: torch.Size) -> torch.Tensor:
        """Return the part of a plane that belongs to a tensor, in ``shape``. Requires that no page is excluded."""
        start = self.table.starts[number]
        return self.planes[plane][start : start + self.table.tensors[number].num_elements].view(shape)

    def whole_page(self, plane: int, number: int) -> torch.Tensor:
        """Return a page [page_elements] of a plane."""
        start = self.places[number] * self.table.page_elements
        return self.planes[plane][start : start + self.table.page_elements]

    def page_views(self, number: int) -> list[torch.Tensor]:
        """Return the moments of a page and its float32 copy, if it has one, each [elements in use]."""
        page = self.table.pages[number]
        count = len(MOMENTS) + page.has_copy
        return [self.whole_page(plane, number)[: page.num_elements] for plane in range(count)]


COPIES: Final = len(MOMENTS)
"""Number of the plane of float32 parameters."""

_PARTS: Final = len(MOMENTS) + 1 + 2 * NUM_BUFFERS  # allocations, each aligned to ``ALIGNMENT``
