"""The cluster of a step and the slicing of its micro-batches, which planners, bounds and replays share."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

ALL_SUMS: Final = 1 << 62
"""Value of ``Slicing.summed_tokens`` with which ranks keep the gradient sums of all kept keys."""


@dataclass(frozen=True, slots=True)
class Slicing:
    """How each stage runs a micro-batch in slices (Seq1F1B, Sun et al. 2024).

    Attributes:
        num_slices: k, slices of a micro-batch; 1 runs each micro-batch whole.
        kept_tokens: the longest ring sequence whose received keys each rank keeps from slice to slice; keys of longer
            sequences travel round the ring again with each slice.
        eager: whether each stage runs two forwards ahead of the next stage, not one (see ``plan.schedule.actions``).
        summed_tokens: the longest sequence with kept keys whose gradient sums each rank keeps too; gradients of longer
            sequences travel to their own ranks with each slice.
        zero_bubble: whether backward passes compute input gradients only, and weight gradients run while a stage would
            be idle (see ``plan.schedule.deferred``).
        swapped_tokens: the longest sequence whose keys are kept in host memory, and on the device only while attention
            uses them; keys of at most ``kept_tokens`` tokens stay on the device.
    """

    num_slices: int = 1
    kept_tokens: int = 0
    eager: bool = False
    summed_tokens: int = ALL_SUMS
    zero_bubble: bool = False
    swapped_tokens: int = 0

    def __post_init__(self) -> None:
        if self.num_slices < 1:
            raise ValueError(f"{self.num_slices} slices of a micro-batch: use 1 or more")
        if self.kept_tokens < 0:
            raise ValueError(f"keys of sequences of up to {self.kept_tokens} tokens are kept: use 0 or more")
        if self.summed_tokens < 0:
            raise ValueError(f"sums of sequences of up to {self.summed_tokens} tokens are kept: use 0 or more")
        if self.swapped_tokens < 0:
            raise ValueError(f"keys of sequences of up to {self.swapped_tokens} tokens are swapped: use 0 or more")

    def __str__(self) -> str:
        """Return a text like ``8 eager slices, keys kept up to 65536 tokens``."""
        if self.num_slices == 1:
            return "1 slice"
        slices = "eager slices" if self.eager else "slices"
        in_host = f", in host memory up to {self.swapped_tokens}" if self.swapped_tokens > self.kept_tokens else ""
        sums = "" if self.summed_tokens >= self.longest_kept else f", gradient sums up to {self.summed_tokens}"
        return f"{self.num_slices} {slices}, keys kept up to {self.kept_tokens} tokens{in_host}{sums}"

    @property
    def longest_kept(self) -> int:
        """Tokens of the longest sequence whose keys are kept, on the device or in host memory."""
        return max(self.kept_tokens, self.swapped_tokens)

    @property
    def order(self) -> str:
        """Name of the order of work: "eager", or "" for the order of 1F1B."""
        return "eager" if self.eager else ""

    @property
    def receives_ahead(self) -> bool:
        """Whether a stage posts the receive of each input one exchange before Megatron's schedule asks for it."""
        return self.eager

    def extra_warm_up(self, later_stages: int) -> int:
        """Return the forwards that a stage runs before its first backward in addition to Megatron's schedule.

        Args:
            later_stages: number of stages after this stage.
        """
        return self.num_slices - 1 + later_stages * self.eager

    def order_of_work(self) -> Slicing:
        """Return the fields that decide the order of work; all settings of kept keys have their defaults."""
        return Slicing(self.num_slices, eager=self.eager, zero_bubble=self.zero_bubble)

    def in_eager_order(self) -> Slicing:
        """Return this slicing in the eager order."""
        return replace(self, eager=True)


ONE_SLICE: Final = Slicing()
"""The slicing of whole micro-batches."""


RING_FORMS: Final = ("auto", "always", "off")
"""When rings consist of inner rings: if the cost model says that it is faster, whenever it is possible, or never."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """The ranks that share a step.

    Attributes:
        num_ranks: HDP ranks; with pipelines, the number of pipelines.
        tokens_per_rank: C, largest number of tokens of a micro-batch on one rank.
        ranks_per_node: HDP ranks of a node; None: all ranks are in one node.
        hierarchical_rings: one of ``RING_FORMS``, for rings over several nodes.
        speeds: speed of each rank, relative to a rank that takes the seconds of the costs; empty: all are 1.
    """

    num_ranks: int
    tokens_per_rank: int
    ranks_per_node: int | None = None
    hierarchical_rings: str = "auto"
    speeds: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name, value in (
            ("number of ranks", self.num_ranks),
            ("tokens per rank", self.tokens_per_rank),
            ("ranks per node", self.ranks_per_node),
        ):
            if value is not None and value < 1:
                raise ValueError(f"the {name} is {value}; it must be at least 1")
        if self.hierarchical_rings not in RING_FORMS:
            raise ValueError(f"hierarchical rings {self.hierarchical_rings!r}: choose one of {', '.join(RING_FORMS)}")
        if self.speeds and (len(self.speeds) != self.num_ranks or not all(0 < one < math.inf for one in self.speeds)):
            raise ValueError(f"speeds {self.speeds} must be {self.num_ranks} positive numbers, one for each rank")

    @property
    def has_equal_speeds(self) -> bool:
        """Whether all ranks take the seconds of the costs."""
        return all(speed == 1.0 for speed in self.speeds)

    def rank_speeds(self) -> npt.NDArray[np.float64]:
        """Return the speed of each rank: [num_ranks]."""
        return np.array(self.speeds) if self.speeds else np.ones(self.num_ranks)

    def unequal_speeds(self) -> npt.NDArray[np.float64] | None:
        """Return the speed of each rank, [num_ranks], or None if all take the seconds of the costs."""
        return None if self.has_equal_speeds else self.rank_speeds()

    @property
    def node_ranks(self) -> int:
        """Ranks of a node, at most all ranks."""
        return min(self.ranks_per_node or self.num_ranks, self.num_ranks)
