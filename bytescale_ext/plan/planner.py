"""Which planner makes the plan of a step: one frozen value, called with the lengths of each step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from bytescale_ext.plan.algorithm2 import place_algorithm2
from bytescale_ext.plan.balance import place_balanced
from bytescale_ext.plan.cost import OffloadLimits, StageCost
from bytescale_ext.plan.hdp import checked_lengths, least_widths, place_naive, plan_static_cp
from bytescale_ext.plan.pipelines import place_pipelined
from bytescale_ext.plan.placed import PlacedRanks
from bytescale_ext.plan.shapes import StepPlan

BALANCES = ("none", "dp", "pp", "bytescale")

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class HdpPlanner:
    """The planner's settings; calling it is pure: equal lengths give an equal plan on every rank.

    Attributes:
        num_ranks: HDP ranks (with pipelines: the number of pipelines).
        tokens_per_rank: C, the most tokens of a micro-batch.
        cost: of one pipeline stage (the slowest), or of the whole model without pipelines.
        tokens_multiple: micro-batches are padded at their end to a multiple of this.
        balance: one of ``BALANCES``; ``bytescale`` is Algorithm 2 as published, ``none`` is Algorithm 1.
        num_stages: pipeline stages.
        num_slices: slices in which each stage runs a micro-batch; ``pp`` plans for them, the others do not.
        kept_tokens: keys of rings' sequences up to this length are kept between slices; the others travel again.
        eager: slices run in the eager order, see ``seq1f1b.SliceSchedule``.
        aligned: the plan must have aligned slots (pipelines, expert parallelism); ``pp`` always has them.
        ranks_per_node: small rings of ``dp`` and ``pp`` stay inside nodes of this many HDP ranks; None: one node.
        static_width: plan static context parallelism of this width instead, to compare with.
        offload: activations may go to host memory within these limits, so that a sequence needs fewer ranks; a plan
            then names the share of each micro-batch. Host memory is shared by the micro-batches in flight. None:
            nothing is offloaded.
    """

    num_ranks: int
    tokens_per_rank: int
    cost: StageCost
    tokens_multiple: int = 1
    balance: str = "dp"
    num_stages: int = 1
    num_slices: int = 1
    kept_tokens: int = 0
    eager: bool = False
    aligned: bool = False
    ranks_per_node: int | None = None
    static_width: int | None = None
    offload: OffloadLimits | None = None

    def __post_init__(self) -> None:
        if self.balance not in BALANCES:
            raise ValueError(f"balance {self.balance!r} is unknown; choose one of {', '.join(BALANCES)}")
        if self.num_slices < 1:
            raise ValueError(f"{self.num_slices} slices of a micro-batch: use 1 or more")
        if self.num_stages < 1 or (self.ranks_per_node is not None and self.ranks_per_node < 1):
            raise ValueError(f"{self.num_stages} stages, {self.ranks_per_node} ranks per node: both must be at least 1")
        if self.balance == "dp" and self.needs_aligned:
            raise ValueError("balance dp has no aligned slots, as pipelines and expert parallelism need; choose pp")

    @property
    def needs_aligned(self) -> bool:
        """Whether the plan must have aligned slots."""
        return self.aligned or self.num_stages > 1

    def __call__(self, lengths: Sequence[int], should_stop: Callable[[], bool] | None = None) -> StepPlan:
        """The plan of a step.

        Args:
            lengths: tokens of each sequence, at least 1 each.
            should_stop: asked now and then; once it says True the planner gives up.

        Raises:
            OutOfTime: ``should_stop`` said so before a plan was found; ``fallback`` has a simple one.
            ValueError: as ``plan_naive``.
        """
        if self.static_width is not None:
            plan = plan_static_cp(
                lengths, self.num_ranks, self.tokens_per_rank, self.static_width, self.tokens_multiple
            )
            return replace(plan, aligned=self.needs_aligned)  # its packs go over all ranks of a group, in turn
        if self.balance == "none":
            return self.fallback(lengths)
        sizes, least = self._sized(lengths)
        step = (sizes, least, self.num_ranks, self.tokens_per_rank)
        node = min(self.ranks_per_node or self.num_ranks, self.num_ranks)
        if self.balance == "pp":
            pipeline = (self.cost, self.num_stages, self.num_slices, self.kept_tokens)
            placed = place_pipelined(*step, *pipeline, node, self.eager, should_stop)
        elif self.balance == "bytescale":
            placed = place_algorithm2(*step, self.cost.both, self.needs_aligned, should_stop)
        else:
            placed = place_balanced(*step, self.cost.both, node, should_stop)
        return self._plan(placed)

    def fallback(self, lengths: Sequence[int]) -> StepPlan:
        """The simple plan (``plan_naive``), valid and made at once, for a planner that ran out of its time."""
        sizes, least = self._sized(lengths)
        return self._plan(place_naive(sizes, least, self.num_ranks, self.tokens_per_rank, self.needs_aligned))

    @property
    def _limits(self) -> OffloadLimits | None:
        """The limits of one micro-batch, of which as many are in flight as there are stages."""
        limits = self.offload
        return None if limits is None else replace(limits, host_bytes=limits.host_bytes / self.num_stages)

    def _sized(self, lengths: Sequence[int]) -> tuple[Ints, Ints]:
        """Tokens and fewest ranks of each sequence: [n] each."""
        sizes = checked_lengths(lengths, self.num_ranks, self.tokens_per_rank, self.tokens_multiple)
        return sizes, least_widths(
            sizes, self.num_ranks, self.tokens_per_rank, self.tokens_multiple, self._limits, self.cost.forward
        )

    def _plan(self, placed: PlacedRanks) -> StepPlan:
        """The plan, with the smallest offload shares that make its widths fit."""
        if self._limits is not None:
            tokens = -(-placed.lengths // placed.widths)
            tokens = -(-tokens // self.tokens_multiple) * self.tokens_multiple
            shares = self._limits.least_shares(tokens.astype(np.float64), self.tokens_per_rank)
            placed = replace(placed, offloads=shares)
        lengths = tuple(placed.lengths.tolist())
        return StepPlan(self.num_ranks, self.tokens_per_rank, lengths, placed, placed.aligned)
