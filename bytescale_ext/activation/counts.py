"""The rows that a plan swaps, keeps and rebuilds, and counts of what was moved and rebuilt."""

from __future__ import annotations

from dataclasses import dataclass, replace

from bytescale_ext.plan.activation.plan import ActivationPlan


@dataclass
class Counts:
    """The bytes, FLOPs and reads of one process since the last reset.

    Attributes:
        swapped_bytes: written to host memory.
        kept_bytes: left on the device, in layers under a plan.
        recomputed_bytes: dropped, and rebuilt in the backward pass.
        recomputed_flops: of the matrix products that rebuilt dropped rows.
        overflowed_bytes: the part of ``kept_bytes`` that should have been swapped, but did not fit in the arena.
        restored_bytes: the most device memory into which the swapped tensors of one layer were read back.
        reads: layers that were read back.
        late_reads: layers whose reading began only when their backward pass did.
    """

    swapped_bytes: int = 0
    kept_bytes: int = 0
    recomputed_bytes: int = 0
    recomputed_flops: int = 0
    overflowed_bytes: int = 0
    restored_bytes: int = 0
    reads: int = 0
    late_reads: int = 0

    def take(self) -> Counts:
        """Return a copy and reset the counts to zero."""
        taken = replace(self)
        vars(self).update(vars(Counts()))
        return taken


@dataclass(frozen=True)
class RowSplit:
    """Rows of one tensor-parallel rank: ``[0, swapped)`` swapped, ``[swapped, kept)`` kept, the rest rebuilt."""

    swapped: int
    kept: int
    total: int


def split_rows(plan: ActivationPlan, num_rows: int) -> RowSplit:
    """Split ``num_rows`` rows into swapped, kept and rebuilt ones."""
    recomputed = round(plan.recompute * num_rows)
    swapped = min(round(plan.swap * num_rows), num_rows - recomputed)
    if plan.keep < 1e-9:
        swapped = num_rows - recomputed
    return RowSplit(swapped, num_rows - recomputed, num_rows)
