"""Settings of pipelines in slices (Seq1F1B): of samples of one length, and of documents; and of zero bubble."""

from __future__ import annotations

from dataclasses import dataclass, replace

from bytescale_ext.plan.evaluate.slicing_choice import OPTIONS
from bytescale_ext.plan.schedule.actions import SliceSchedule, slice_group_size
from bytescale_ext.plan.schedule.check import checked_schedule
from bytescale_ext.plan.schedule.document_slices import SliceRule
from bytescale_ext.plan.step.sizes import Slicing


@dataclass(frozen=True)
class SliceConfig:
    """Samples of one length, each cut into the same slices.

    Attributes:
        slicing: k slices of a micro-batch, and the order in which stages run them.
        lengths: tokens of each slice; their sum is the sequence length.
        num_stages: pipeline stages.
        num_chunks: virtual stages of each.
        row_shares: ranks that share the rows between layers: the tensor-parallel size under sequence parallelism.
    """

    slicing: Slicing
    lengths: tuple[int, ...]
    num_stages: int
    num_chunks: int = 1
    row_shares: int = 1

    def __post_init__(self) -> None:
        assert len(self.lengths) == self.slicing.num_slices, f"{self.lengths=} {self.slicing=}"

    @property
    def group_size(self) -> int:
        """Slices that pass a virtual stage together."""
        return slice_group_size(self.num_stages, self.slicing.num_slices)

    @property
    def receives_ahead(self) -> bool:
        """Whether stages may run two forwards ahead."""
        return self.slicing.receives_ahead

    def schedule(self, num_micro_batches: int) -> SliceSchedule:
        """Return the checked schedule of a step.

        Raises ValueError where virtual stages do not run this number of micro-batches.
        """
        return checked_schedule(self.num_stages, num_micro_batches, self.slicing, self.num_chunks)


@dataclass(frozen=True)
class DocumentSliceConfig:
    """Micro-batches of documents (hybrid data parallelism), each cut by a rule.

    Attributes:
        rule: rule that cuts a micro-batch into slices.
        num_stages: pipeline stages.
        note: what to tell the user once about keys that are kept between slices; "" where micro-batches run whole.
        is_chosen: the planner chooses the slices of each step; the rule does not apply.
        host_bytes: host memory of this process for swapped keys; 0: no keys are swapped.
    """

    rule: SliceRule
    num_stages: int
    note: str = ""
    is_chosen: bool = False
    host_bytes: float = 0.0

    def with_note(self, note: str) -> DocumentSliceConfig:
        """Return these slices with a note."""
        return replace(self, note=note)

    @property
    def slicing(self) -> Slicing:
        """The slices, as planners take them."""
        return self.rule.slicing

    @property
    def receives_ahead(self) -> bool:
        """Whether stages may run two forwards ahead."""
        options = OPTIONS if self.is_chosen else (self.slicing,)
        return any(slicing.receives_ahead for slicing in options)

    @property
    def group_size(self) -> int:
        """Slices that pass a virtual stage together."""
        return slice_group_size(self.num_stages, self.slicing.num_slices)


@dataclass(frozen=True)
class ZeroBubble:
    """Weight gradients run where a stage would be idle; no stage holds more than ``most_slices`` slices."""

    most_slices: int
