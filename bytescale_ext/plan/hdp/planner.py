"""The planner of a step: one frozen value that is called with the lengths of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from bytescale_ext.plan.activation.offload import OffloadLimits
from bytescale_ext.plan.cost.cost_model import StageCost
from bytescale_ext.plan.cost.learned import LearnedCosts
from bytescale_ext.plan.hdp.baselines import place_naive
from bytescale_ext.plan.hdp.deadline import ShouldStop
from bytescale_ext.plan.hdp.forms import with_ring_forms
from bytescale_ext.plan.hdp.problem import Problem, checked_lengths, min_widths, static_widths
from bytescale_ext.plan.hdp.table import STATIC_MESH, Place, PlannerRow, auto_balance, planner_row, stateless
from bytescale_ext.plan.step.numbers import Numbers
from bytescale_ext.plan.step.placed import PlacedRanks
from bytescale_ext.plan.step.plan import StepPlan
from bytescale_ext.plan.step.sizes import ONE_SLICE, Cluster, Slicing

Choose = Callable[[Problem, Place], tuple[Slicing, PlacedRanks]]
"""Chooses the slicing of a step, and returns it with the placement that the given planner makes for it."""


@dataclass(frozen=True)
class HdpPlanner:
    """The planner with its settings. A call is pure: equal lengths give equal plans on every rank.

    Attributes:
        cluster: HDP ranks; with pipelines, each rank is a pipeline.
        stages: cost of each pipeline stage with its nodes, the slowest stage last; a single stage without pipelines.
        slicing: slicing of the micro-batches on each stage.
        tokens_multiple: multiple of tokens to which micro-batches are padded; plans count the mean padding.
        balance: name of a planner in ``table.PLANNERS``.
        aligned: whether plans need aligned slots even without pipelines (expert parallelism).
        static_width: width of static context parallelism, which replaces ``balance``; None: no static mesh.
        offload: limits within which activations may go to host memory, so that a sequence needs fewer ranks; a plan
            then names the share of each micro-batch, and the micro-batches in flight share the host memory. None:
            nothing is offloaded.
        expert_share: share of routed experts in the work of a stage that is linear in tokens.
        choice: function that chooses the slicing of each step, which the plan then names. It is pure and needs
            pipelines. None: ``slicing``.
    """

    cluster: Cluster
    stages: tuple[StageCost, ...]
    slicing: Slicing = ONE_SLICE
    tokens_multiple: int = 1
    balance: str = "dp"
    aligned: bool = False
    static_width: int | None = None
    offload: OffloadLimits | None = None
    choice: Choose | None = None
    expert_share: float = 0.0

    def __post_init__(self) -> None:
        planner_row(self.balance)  # refuses an unknown name
        if not self.stages:
            raise ValueError("0 stages: give the cost of at least 1")
        if self.needs_aligned and not self.row.aligned:
            raise ValueError(
                f"balance {self.row.name} makes no aligned slots, which pipelines and expert parallelism need; "
                f"choose {auto_balance(aligned=True)}"
            )
        assert self.choice is None or len(self.stages) > 1, f"{self.choice=} {len(self.stages)=}"

    @property
    def row(self) -> PlannerRow:
        """The row of the planner in the table."""
        return STATIC_MESH if self.static_width is not None else planner_row(self.balance)

    @property
    def needs_aligned(self) -> bool:
        """Whether plans must have aligned slots."""
        return self.aligned or len(self.stages) > 1

    def with_expert_imbalance(self, ratio: float) -> HdpPlanner:
        """Return the planner for steps whose busiest rank gets ``ratio`` times the mean tokens of routed experts.

        All ranks that share experts wait for the busiest rank, so routed experts take ``ratio`` times as long on each.
        """
        factor = 1.0 + self.expert_share * (ratio - 1.0)
        return replace(self, stages=tuple(stage.with_linear(factor) for stage in self.stages))

    def with_costs(self, learned: LearnedCosts) -> HdpPlanner:
        """Return the planner with learned costs and speeds of ranks."""
        cluster = replace(self.cluster, speeds=learned.speeds)
        return replace(self, cluster=cluster, stages=tuple(learned.of_stage(stage) for stage in self.stages))

    def __call__(self, lengths: Sequence[int], should_stop: ShouldStop = None) -> StepPlan:
        """Return the plan of a step.

        Args:
            lengths: tokens of each sequence, at least 1 each.
            should_stop: called regularly; once it returns True, the planner gives up.

        Raises:
            OutOfTime: ``should_stop`` returned True before a plan was found; ``fallback`` makes a simple plan.
            ValueError: C is not a multiple of ``tokens_multiple``, a sequence is empty, or a sequence does not fit on
                its ranks (the message names the smallest C that fits).
        """
        problem, placer = self._problem(lengths, self.static_width), self.row.placer(should_stop)

        def place(problem: Problem, thorough: bool) -> PlacedRanks:
            return placer(problem if self.row.sliced else replace(problem, slicing=ONE_SLICE), thorough)

        if self.choice is None:
            return self._plan(place(problem, thorough=True))
        slicing, placed = self.choice(problem, place)
        return self._plan(placed, slicing)

    def fallback(self, lengths: Sequence[int]) -> StepPlan:
        """Return the plan of ``place_naive``, which is quick, after the planner ran out of time. Raises as a call."""
        problem = self._problem(lengths, None)
        if self.choice is None:
            return self._plan(place_naive(problem))
        slicing, placed = self.choice(problem, stateless(place_naive)(None))
        return self._plan(placed, slicing)

    @property
    def _limits(self) -> OffloadLimits | None:
        """Limits of one micro-batch: all micro-batches in flight, one per stage, share the host memory."""
        limits = self.offload
        return None if limits is None else replace(limits, host_bytes=limits.host_bytes / len(self.stages))

    def _problem(self, lengths: Sequence[int], static_width: int | None) -> Problem:
        """Return the problem of a step."""
        sizes = checked_lengths(lengths, self.cluster, self.tokens_multiple)
        if static_width is None:
            forward = self.stages[-1].forward
            widths = min_widths(sizes, self.cluster, self.tokens_multiple, self._limits, forward)
        else:
            widths = static_widths(sizes, self.cluster, static_width, self.tokens_multiple)
        padding = (self.tokens_multiple - 1) / 2 / self.slicing.num_slices  # mean rows: only the last slice is padded
        stages = tuple(stage.with_padding(padding) for stage in self.stages)
        settings = (self.slicing, self.needs_aligned, static_width, self._is_uneven)
        return Problem(sizes, widths, self.cluster, stages, *settings)

    @property
    def _is_uneven(self) -> bool:
        """Whether rings over ranks of unlike speeds may have uneven shares."""
        has_slices = self.choice is not None or self.slicing.num_slices > 1
        has_windows = any(stage.forward.window_share for stage in self.stages)
        is_plain = not (has_slices or has_windows or self.needs_aligned or self.offload is not None)
        return is_plain and not self.cluster.has_equal_speeds

    def _plan(self, placed: PlacedRanks, slicing: Slicing | None = None) -> StepPlan:
        """Return the plan of a placement, with the smallest offload shares with which its sequences fit."""
        if self._limits is not None:
            tokens = -(-placed.lengths // placed.widths)
            tokens = -(-tokens // self.tokens_multiple) * self.tokens_multiple
            shares = self._limits.min_shares(tokens.astype(np.float64), self.cluster.tokens_per_rank)
            placed = replace(placed, offloads=shares)
        placed = with_ring_forms(placed, self.stages[-1], self.cluster, slicing or self.slicing)
        settings = (self.cluster.num_ranks, self.cluster.tokens_per_rank, Numbers(placed.lengths))
        return StepPlan(*settings, placed, placed.aligned, slicing)
