"""What the user asked for of slices, settled: nothing after this decides anything."""

from __future__ import annotations

from dataclasses import dataclass

from bytescale_ext.plan.seq1f1b import SliceSchedule, slice_group_size
from bytescale_ext.plan.seq1f1b_check import checked_schedule


@dataclass(frozen=True)
class SliceConfig:
    """Micro-batches cut into slices, in one training run.

    Attributes:
        lengths: tokens of each slice; their sum is the sequence length.
        num_stages: pipeline stages.
        num_chunks: virtual stages of each.
        row_shares: ranks that share the rows between layers: the tensor-parallel size under sequence parallelism.
        eager: see ``SliceSchedule``.
    """

    lengths: tuple[int, ...]
    num_stages: int
    num_chunks: int = 1
    row_shares: int = 1
    eager: bool = False

    @property
    def num_slices(self) -> int:
        """k."""
        return len(self.lengths)

    @property
    def seq_length(self) -> int:
        """Tokens of a micro-batch's sample."""
        return sum(self.lengths)

    @property
    def group_size(self) -> int:
        """Slices that pass a virtual stage together."""
        return slice_group_size(self.num_stages, self.num_slices)

    def schedule(self, num_micro_batches: int) -> SliceSchedule:
        """The checked schedule of a step. Raises ValueError where virtual stages do not run so many micro-batches."""
        return checked_schedule(self.num_stages, num_micro_batches, self.num_slices, self.num_chunks, self.eager)
