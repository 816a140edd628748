"""Host memory, in addition to pages, for the gradients and results of updates that overlap with training."""

from __future__ import annotations

from typing import Final

HALF: Final = 2
"""A parameter with a float32 copy has 16 bits, half a page for each page of copies."""


def late_bytes(num_pages: int, num_copies: int, page_bytes: int, update_steps: int) -> int:
    """Return the bytes of the buffers of one optimizer; 0 without ``update_steps``.

    Gradients are summed in a buffer of all pages. If an update overlaps with several steps, there are two such buffers:
    one grows while the update reads the other. Results wait in a further buffer until a step takes them.
    """
    if not update_steps:
        return 0
    num_sums = 2 if update_steps > 1 else 1
    return num_sums * num_pages * page_bytes + result_bytes(num_pages, num_copies, page_bytes)


def result_bytes(num_pages: int, num_copies: int, page_bytes: int) -> int:
    """Return the bytes of the parameters of all pages in the types of the model."""
    return num_copies * (page_bytes // HALF) + (num_pages - num_copies) * page_bytes
