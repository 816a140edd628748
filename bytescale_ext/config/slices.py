"""Settings of pipeline schedules: slices of fixed-length samples or of documents (Seq1F1B), and zero bubble."""

from __future__ import annotations

from dataclasses import dataclass, replace

from bytescale_ext.plan.evaluate.slicing_choice import OPTIONS
from bytescale_ext.plan.schedule.actions import SliceSchedule, slice_group_size
from bytescale_ext.plan.schedule.check import checked_schedule
from bytescale_ext.plan.schedule.document_slices import SliceRule
from bytescale_ext.plan.step.sizes import Slicing


@dataclass(frozen=True)
class SliceConfig:
    """Slices of samples of one length, which are equal for all samples.

    Attributes:
        slicing: number of slices of a micro-batch, and their order on a stage.
        lengths: tokens of each slice, which sum to the sequence length.
        num_stages: number of pipeline stages.
        num_chunks: number of virtual stages per pipeline stage.
        row_shares: number of ranks that share the rows between layers, which is the tensor-parallel size under sequence
            parallelism.
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
        """Number of slices that pass a virtual stage together."""
        return slice_group_size(self.num_stages, self.slicing.num_slices)

    @property
    def receives_ahead(self) -> bool:
        """Whether stages may run two forward passes ahead."""
        return self.slicing.receives_ahead

    def schedule(self, num_micro_batches: int) -> SliceSchedule:
        """Return the checked schedule of a step.

        Raises ValueError if the schedule of virtual stages does not support this number of micro-batches.
        """
        return checked_schedule(self.num_stages, num_micro_batches, self.slicing, self.num_chunks)


@dataclass(frozen=True)
class DocumentSliceConfig:
    """Slices of micro-batches of documents (hybrid data parallelism).

    Attributes:
        rule: rule that splits a micro-batch into slices.
        num_stages: number of pipeline stages.
        note: message to the user about keys that are kept between slices; "" if micro-batches are not split.
        is_chosen: whether the planner chooses the slices of each step, instead of the rule.
        host_bytes: host memory of this process for swapped keys, in bytes; 0 means that no keys are swapped.
    """

    rule: SliceRule
    num_stages: int
    note: str = ""
    is_chosen: bool = False
    host_bytes: float = 0.0

    def with_note(self, note: str) -> DocumentSliceConfig:
        """Return a copy with a note."""
        return replace(self, note=note)

    @property
    def slicing(self) -> Slicing:
        """Number and order of the slices, as an input of planners."""
        return self.rule.slicing

    @property
    def receives_ahead(self) -> bool:
        """Whether stages may run two forward passes ahead."""
        options = OPTIONS if self.is_chosen else (self.slicing,)
        return any(slicing.receives_ahead for slicing in options)

    @property
    def group_size(self) -> int:
        """Number of slices that pass a virtual stage together."""
        return slice_group_size(self.num_stages, self.slicing.num_slices)


@dataclass(frozen=True)
class ZeroBubble:
    """Schedule that computes weight gradients while a stage would be idle.

    Attributes:
        most_slices: largest number of slices whose activations a stage stores.
    """

    most_slices: int
