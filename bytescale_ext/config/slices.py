"""Settings of pipelines in slices (Seq1F1B): of samples of one length, and of documents."""

from __future__ import annotations

from dataclasses import dataclass, replace

from bytescale_ext.plan.schedule.actions import SliceSchedule, slice_group_size
from bytescale_ext.plan.schedule.check import checked_schedule
from bytescale_ext.plan.schedule.document_slices import SliceRule
from bytescale_ext.plan.step.sizes import Slicing


@dataclass(frozen=True)
class SliceConfig:
    """Samples of one length, each cut into the same slices.

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
    def group_size(self) -> int:
        """Slices that pass a virtual stage together."""
        return slice_group_size(self.num_stages, self.num_slices)

    def schedule(self, num_micro_batches: int) -> SliceSchedule:
        """Return the checked schedule of a step.

        Raises ValueError where virtual stages do not run this number of micro-batches.
        """
        slicing = Slicing(self.num_slices, eager=self.eager)
        return checked_schedule(self.num_stages, num_micro_batches, slicing, self.num_chunks)


@dataclass(frozen=True)
class DocumentSliceConfig:
    """Micro-batches of documents (hybrid data parallelism), each cut by a rule.

    Attributes:
        rule: how a micro-batch is cut.
        num_stages: pipeline stages.
        eager: see ``SliceSchedule``.
        note: what to tell the user once about keys that are kept between slices.
    """

    rule: SliceRule
    num_stages: int
    eager: bool = False
    note: str = ""

    def with_note(self, note: str) -> DocumentSliceConfig:
        """Return these slices with a note."""
        return replace(self, note=note)

    @property
    def slicing(self) -> Slicing:
        """The slices, as planners take them."""
        return Slicing(self.rule.num_slices, self.rule.kept_tokens, self.eager)

    @property
    def group_size(self) -> int:
        """Slices that pass a virtual stage together."""
        return slice_group_size(self.num_stages, self.rule.num_slices)
