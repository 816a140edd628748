"""Page table: locations of Adam's states in pages of fixed size (Angel-PTM, Nie et al. 2023).

A page has ``page_bytes`` of one *plane* in float32. All planes have the same page numbers: page 7 of the first moments,
of the second moments and of the float32 parameters belong to the same elements. So a page number names all states of
an element, and one call of Adam updates them.

    group 0             group 1 (no weight decay)
    |A A A A|A A B B|B B B .|p q r . |          tensors A, B; p, q and r are shorter than a page
    0       1       2       3                   pages
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

FLOAT_BYTES: Final = 4
"""Bytes of an element of a state, in float32."""

NUM_MOMENTS: Final = 2
"""Number of Adam's moments: the running means of the gradient and of its square."""

MEBIBYTE: Final = 1 << 20
LEAST_PAGE_BYTES: Final = 4096
"""Smallest size of a page. Smaller pages would take longer to manage than to update."""

NUM_BUFFERS: Final = 2
"""Number of pages in flight: while a page is updated, the gradients of the next page are fetched."""

NUM_GRADIENT_SLOTS: Final = 32
"""Number of pages for parts of gradients that are copied to the host during the backward pass, from stage 2 on."""


@dataclass(frozen=True, slots=True)
class StateTensor:
    """A parameter of the optimizer.

    Attributes:
        name: name in messages.
        num_elements: elements of the parameter, or of the part that this rank updates.
        group: parameter group of the optimizer; its elements share learning rate and weight decay.
        has_copy: whether pages contain a float32 copy of the parameter, because the model's parameter has fewer bits.
            Otherwise Adam updates the model's parameter itself, which stays on the device.
    """

    name: str
    num_elements: int
    group: int
    has_copy: bool


@dataclass(frozen=True, slots=True)
class PagePart:
    """Consecutive elements of a tensor in one page.

    Attributes:
        tensor: number of the tensor in the table.
        tensor_start: first element in the tensor.
        page_start: first element in the page.
        num_elements: number of elements.
    """

    tensor: int
    tensor_start: int
    page_start: int
    num_elements: int


@dataclass(frozen=True, slots=True)
class Page:
    """One page of each plane.

    Attributes:
        group: parameter group of all its elements.
        has_copy: whether the plane of float32 parameters has this page.
        parts: parts of tensors, from the first element on and without gaps.
    """

    group: int
    has_copy: bool
    parts: tuple[PagePart, ...]

    @property
    def num_elements(self) -> int:
        """Number of elements in use; the rest of the page is empty."""
        return sum(part.num_elements for part in self.parts)


@dataclass(frozen=True)
class PageTable:
    """Location of each tensor's states.

    Attributes:
        tensors: tensors that the optimizer updates on this rank, in its order.
        page_bytes: bytes of a page.
        pages: pages; pages with a float32 copy come first, so that each plane is one run of pages.
    """

    tensors: tuple[StateTensor, ...]
    page_bytes: int
    pages: tuple[Page, ...]

    @property
    def page_elements(self) -> int:
        """Number of elements of a page."""
        return self.page_bytes // FLOAT_BYTES

    @property
    def num_copies(self) -> int:
        """Number of pages of the plane of float32 parameters."""
        return sum(page.has_copy for page in self.pages)

    @property
    def num_host_pages(self) -> int:
        """Number of pages of all planes."""
        return NUM_MOMENTS * len(self.pages) + self.num_copies

    @property
    def host_bytes(self) -> int:
        """Host memory of the planes, and of the buffers for gradients and values of the pages in flight, in bytes."""
        return (self.num_host_pages + 2 * NUM_BUFFERS * bool(self.pages)) * self.page_bytes

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """First element of each tensor in a plane."""
        first_elements: dict[int, int] = {}
        for number, page in enumerate(self.pages):
            for part in page.parts:
                first_elements.setdefault(part.tensor, number * self.page_elements + part.page_start)
        return tuple(first_elements[number] for number in range(len(self.tensors)))

    def described(self) -> str:
        """Return the table as text with one row per page."""
        lines = [f"{len(self.pages)} pages of {self.page_bytes:,} bytes, {self.host_bytes:,} bytes of host memory",
                 f"{'page':>6} {'group':>5} {'planes':>6} {'elements':>9}  tensors"]  # fmt: skip
        for number, page in enumerate(self.pages):
            names = ", ".join(
                f"{self.tensors[part.tensor].name}[{part.tensor_start}:{part.tensor_start + part.num_elements}]"
                for part in page.parts
            )
            planes = NUM_MOMENTS + page.has_copy
            lines.append(f"{number:6} {page.group:5} {planes:6} {page.num_elements:9}  {names}")
        return "\n".join(lines)


def page_bytes_of(mebibytes: float, flag: str) -> int:
    """Return the bytes of a page of this size in MiB, rounded to whole elements.

    Raises ValueError, which names the flag, if the size is below ``LEAST_PAGE_BYTES``.
    """
    if not LEAST_PAGE_BYTES <= mebibytes * MEBIBYTE < math.inf:
        raise ValueError(f"{flag} {mebibytes:g} must be at least {LEAST_PAGE_BYTES / MEBIBYTE:g}")
    return int(mebibytes * MEBIBYTE) // FLOAT_BYTES * FLOAT_BYTES


def lay_out(tensors: Sequence[StateTensor], page_bytes: int) -> PageTable:
    """Return the page table of these tensors.

    Tensors of one group are stored end to end, and each group begins at a new page. Tensors shorter than a page come
    first in their group, so that every other page contains parts of at most two tensors.

    Raises ValueError for a page that is not a positive multiple of an element.
    """
    if page_bytes < FLOAT_BYTES or page_bytes % FLOAT_BYTES:
        raise ValueError(f"a page of {page_bytes} bytes is not a multiple of {FLOAT_BYTES} bytes")
    length = page_bytes // FLOAT_BYTES
    pages: list[Page] = []
    for lacks_copy, group in sorted({(not tensor.has_copy, tensor.group) for tensor in tensors}):
        mine = [number for number, one in enumerate(tensors) if (not one.has_copy, one.group) == (lacks_copy, group)]
        mine.sort(key=lambda number: tensors[number].num_elements >= length)
        sizes = [(number, tensors[number].num_elements) for number in mine]
        pages += [Page(group, not lacks_copy, parts) for parts in _cut(sizes, length)]
    return PageTable(tuple(tensors), page_bytes, tuple(pages))


def _cut(sizes: Sequence[tuple[int, int]], length: int) -> list[tuple[PagePart, ...]]:
    """Return the parts in each page for tensors, given as (number, elements), that are stored end to end."""
    pages: list[list[PagePart]] = []
    used = length  # elements in the last page
    for tensor, num_elements in sizes:
        done = 0
        while done < num_elements:
            if used == length:
                pages.append([])
                used = 0
            taken = min(num_elements - done, length - used)
            pages[-1].append(PagePart(tensor, done, used, taken))
            done, used = done + taken, used + taken
    return [tuple(parts) for parts in pages]
