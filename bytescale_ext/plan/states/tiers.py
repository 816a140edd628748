"""Pages on a disk and their places in its file (Angel-PTM, Nie et al. 2023: pages of fixed size over three tiers).

Pages in host memory and on the disk take turns in the order of the update, so that the disk works all the time:

    page       0 1 2 3 4 5 6 7
    on disk      x   x   x   x        half of them

The file contains two *versions* of every plane. A step reads one version and writes the other. A record at the start of
the file then names the new version. So the newest recorded version is always complete.

    |record 0|record 1|first moments|second moments|copies|first moments|second moments|copies|
                       version 0                           version 1
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from bytescale_ext.plan.states.pages import NUM_BUFFERS, NUM_MOMENTS, PageTable

NUM_SLOTS: Final = 4
"""Number of pages of the disk in host memory at a time: read ahead, in update, or being written."""

NUM_VERSIONS: Final = 2
BLOCK_BYTES: Final = 4096
"""Granularity of direct I/O in bytes: sizes and addresses are multiples of it."""

CHECKSUM_BYTES: Final = 4
HEADER_BYTES: Final = 64
"""Bytes of a record before the checksums of the pages."""


def pages_on_disk(table: PageTable, host_bytes: float) -> frozenset[int]:
    """Return the pages on a disk: as few as possible so that the others fit in host memory, spread over the table.

    Returns all pages if even that is not enough; see ``tiered_host_bytes``.
    """
    if table.host_bytes <= host_bytes:
        return frozenset()
    low, high = 0, len(table.pages)
    while high - low > 1:
        middle = (low + high) // 2
        fits = tiered_host_bytes(table, spread(len(table.pages), middle)) <= host_bytes
        low, high = (low, middle) if fits else (middle, high)
    return spread(len(table.pages), high)


def spread(num_pages: int, num_chosen: int) -> frozenset[int]:
    """Return ``num_chosen`` of ``num_pages`` page numbers, at equal distances."""
    step = num_pages or 1
    return frozenset(
        page for page in range(num_pages) if (page + 1) * num_chosen // step > page * num_chosen // step
    )  # fmt: skip


def tiered_host_bytes(table: PageTable, on_disk: Collection[int]) -> int:
    """Return the host memory of pages that are not on a disk, of the buffers of the link and of the disk's slots."""
    if not on_disk:
        return table.host_bytes
    planes = sum(NUM_MOMENTS + page.has_copy for number, page in enumerate(table.pages) if number not in on_disk)
    return planes * table.page_bytes + least_host_bytes(table.page_bytes, table.num_copies > 0)


def least_host_bytes(page_bytes: int, has_copies: bool) -> int:
    """Return the host memory that is needed even if all pages are on a disk."""
    return (2 * NUM_BUFFERS + NUM_SLOTS * (NUM_MOMENTS + has_copies)) * page_bytes


@dataclass(frozen=True, slots=True)
class FileLayout:
    """Places of pages in the file, in bytes.

    Attributes:
        num_pages: number of pages of a plane of moments.
        num_copies: number of pages of the plane of float32 parameters.
        page_bytes: bytes of a page, a multiple of ``BLOCK_BYTES``.
    """

    num_pages: int
    num_copies: int
    page_bytes: int

    @classmethod
    def of(cls, table: PageTable) -> FileLayout:
        """Return the layout of a table's file."""
        return cls(len(table.pages), table.num_copies, table.page_bytes)

    @property
    def num_planes(self) -> int:
        """Number of planes that have pages."""
        return NUM_MOMENTS + (self.num_copies > 0)

    @property
    def version_pages(self) -> int:
        """Number of pages of all planes."""
        return NUM_MOMENTS * self.num_pages + self.num_copies

    @property
    def record_bytes(self) -> int:
        """Bytes of a record: a header and the checksum of every page."""
        used = HEADER_BYTES + CHECKSUM_BYTES * self.version_pages
        return -(-used // BLOCK_BYTES) * BLOCK_BYTES

    @property
    def version_bytes(self) -> int:
        """Bytes of a version."""
        return self.version_pages * self.page_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of the file."""
        return NUM_VERSIONS * (self.record_bytes + self.version_bytes)

    def index(self, plane: int, page: int) -> int:
        """Return the number of a plane's page among all pages of a version; copies are the last plane."""
        return plane * self.num_pages + page

    def version_offset(self, version: int) -> int:
        """Return the byte offset of a version in the file."""
        return NUM_VERSIONS * self.record_bytes + version * self.version_bytes

    def offset(self, version: int, plane: int, page: int) -> int:
        """Return the byte offset of a page of a plane in the file."""
        return self.version_offset(version) + self.index(plane, page) * self.page_bytes
