"""What a plan does to the rows of a micro-batch, and what was done."""

from __future__ import annotations

from dataclasses import dataclass

from bytescale_ext.plan.activation import ActivationPlan


@dataclass
class Counts:
    """What one process moved and rebuilt since the counts were set to zero.

    Attributes:
        swapped_bytes: written to host memory.
        kept_bytes: left on the device, of layers under a plan.
        recomputed_bytes: dropped, and rebuilt in the backward pass.
        recomputed_flops: of the matrix products that rebuilt them.
        overflowed_bytes: of those kept, what the plan swaps and the arena had no room for.
        restored_bytes: the most device memory that the swapped tensors of one layer came back to.
    """

    swapped_bytes: int = 0
    kept_bytes: int = 0
    recomputed_bytes: int = 0
    recomputed_flops: int = 0
    overflowed_bytes: int = 0
    restored_bytes: int = 0


@dataclass(frozen=True)
class RowSplit:
    """Rows of one tensor-parallel rank: ``[0, swapped)`` swapped, ``[swapped, kept)`` kept, the rest rebuilt."""

    swapped: int
    kept: int
    total: int


def split_rows(plan: ActivationPlan, num_rows: int) -> RowSplit:
    """The rows of ``num_rows`` that a plan swaps, keeps and rebuilds."""
    recomputed = round(plan.recompute * num_rows)
    swapped = min(round(plan.swap * num_rows), num_rows - recomputed)
    if plan.keep < 1e-9:
        swapped = num_rows - recomputed
    return RowSplit(swapped, num_rows - recomputed, num_rows)
