"""The split of a tensor's rows by an activation plan, and counts of the bytes moved and rebuilt."""

from __future__ import annotations

from dataclasses import dataclass, replace

from bytescale_ext.plan.activation.plan import ActivationPlan


@dataclass
class Counts:
    """Bytes, FLOPs and reads of a process since the last reset.

    Attributes:
        swapped_bytes: bytes written to host memory.
        kept_bytes: bytes left on the device, in layers under a plan.
        recomputed_bytes: bytes dropped, and recomputed in the backward pass.
        recomputed_flops: FLOPs of the matrix products that recomputed dropped rows.
        overflowed_bytes: part of ``kept_bytes`` that the plan swaps, but that did not fit in the arena.
        restored_bytes: the most device memory that the swapped tensors of one layer were read back into.
        reads: number of layers that were read back.
        late_reads: number of layers whose read started only with their backward pass.
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
    """Split of a tensor-parallel rank's rows: ``[0, swapped)`` swapped, ``[swapped, kept)`` kept, others recomputed."""

    swapped: int
    kept: int
    total: int


def split_rows(plan: ActivationPlan, num_rows: int) -> RowSplit:
    """Split ``num_rows`` rows by the shares of a plan."""
    recomputed = round(plan.recompute * num_rows)
    swapped = min(round(plan.swap * num_rows), num_rows - recomputed)
    if plan.keep < 1e-9:
        swapped = num_rows - recomputed
    return RowSplit(swapped, num_rows - recomputed, num_rows)
