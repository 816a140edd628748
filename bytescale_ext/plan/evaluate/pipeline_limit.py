"""Lower bound on the time of any 1F1B plan from its longest sequence, by linear programs: slow and tight.

In a pipeline of p stages the order of work is fixed (1F1B, ``plan.schedule.actions``), so the time of a pipeline is
the longest path through its actions, which is convex in the sizes of its slots. For a given total of work and a given
size of one slot, the least time is a linear program over the sizes of all other slots, which may be split arbitrarily
finely. No plan can avoid this total and this size: the longest sequence is on some ring of d pipelines, with
``t(s, d)`` on each, and the pipelines outside the ring cannot work longer than the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from bytescale_ext.plan.cost.cost_model import StageCost
from bytescale_ext.plan.schedule.actions import seq1f1b_schedule
from bytescale_ext.plan.step.sizes import Cluster

BACKWARD_PER_FORWARD = (2.0, 2.5)
"""Smallest and largest ratio of backward to forward time of a slot: for linear work only, and for attention only."""
_GRID = tuple(float(total) for total in np.geomspace(1.0, 64.0, 90))


@dataclass(frozen=True, slots=True)
class Limit:
    """Lower bound ``seconds`` of a step; the longest sequence is on ``width`` ranks in this bound."""

    seconds: float
    width: int


@cache
def least_time(num_stages: int, total: float, backward_share: float, num_slots: int = 12) -> float:
    """Return the least 1F1B time of a pipeline with one (tall) slot of 1 second.

    It is the minimum over all positions of the tall slot. More slots change the result by less than one per cent (12
    and 30 were compared).

    Args:
        num_stages: number of pipeline stages.
        total: seconds of work on each stage.
        backward_share: backward part of the tall slot's second.
        num_slots: number of slots, which may be empty.
    """
    return min(_solve(num_stages, total, backward_share, num_slots, place) for place in range(num_slots))


def _solve(num_stages: int, total: float, backward_share: float, num_slots: int, tall: int) -> float:
    """Solve one linear program over the sizes of slots and the times at which actions end."""
    from ortools.linear_solver import pywraplp

    solver = pywraplp.Solver.CreateSolver("GLOP")
    infinity = solver.infinity()
    seconds = {kind: [solver.NumVar(0, infinity, "") for _ in range(num_slots)] for kind in "FB"}
    low, high = BACKWARD_PER_FORWARD
    for forward, backward in zip(seconds["F"], seconds["B"], strict=True):
        solver.Add(backward >= low * forward)
        solver.Add(backward <= high * forward)
    solver.Add(sum(seconds["F"]) + sum(seconds["B"]) >= total)
    solver.Add(seconds["B"][tall] >= backward_share)
    solver.Add(seconds["F"][tall] >= 1.0 - backward_share)
    ends = {(kind, stage, slot): solver.NumVar(0, infinity, "")
            for kind in "FB" for stage in range(num_stages) for slot in range(num_slots)}  # fmt: skip
    step = solver.NumVar(0, infinity, "")
    for stage, actions in enumerate(seq1f1b_schedule(num_stages, num_slots).stages):
        previous = None
        for action in actions:
            end = ends[action.kind, stage, action.micro_batch]
            length = seconds[action.kind][action.micro_batch]
            before = _cause(action.kind, stage, num_stages)
            for other in (previous, before and ends[(*before, action.micro_batch)]):
                solver.Add(end >= length + (other if other is not None else 0))
            previous = end
        solver.Add(step >= previous)
    solver.Minimize(step)
    status = solver.Solve()
    assert status == solver.OPTIMAL, f"{status=} {num_stages=} {total=} {num_slots=} {tall=}"
    return float(step.solution_value())


def _cause(kind: str, stage: int, num_stages: int) -> tuple[str, int] | None:
    """Return the action that must end before an action, or None for forward passes on the first stage.

    It is on a neighbouring stage, except for backward passes on the last stage, which follow their forward pass.
    """
    if kind == "F":
        return ("F", stage - 1) if stage else None
    return ("B", stage + 1) if stage + 1 < num_stages else ("F", stage)


def pipeline_limit(lengths: Sequence[int], cluster: Cluster, cost: StageCost, num_stages: int) -> Limit:
    """Return a lower bound on the step of any aligned plan, all stages as cheap as ``cost``; launches are free.

    For each width d of the longest sequence, the pipelines of its ring have at least the work that remains if all other
    pipelines work for the whole step. The smallest T with ``least_time(work, t(s, d)) <= T`` is found by bisection.
    ``least_time`` is evaluated at the next smaller total of a grid, so the bound holds.

    Raises ImportError if OR-tools is not installed.
    """
    num_ranks, tokens_per_rank = cluster.num_ranks, cluster.tokens_per_rank
    sizes = np.asarray(lengths, dtype=np.float64)
    work = float(cost.both.sequence_cost(sizes, np.ones(len(sizes))).sum())
    longest = int(sizes.max())
    best = Limit(np.inf, 0)
    for width in range(-(-longest // tokens_per_rank), num_ranks + 1):
        tall, backward = (float(part.sequence_cost(longest, width)) for part in (cost.both, cost.backward))
        ring = _Ring(num_stages, work, num_ranks, width, tall, backward)
        low, high = work / num_ranks, min(best.seconds, 100 * (work + num_stages * tall))
        if ring.seconds(high) > high:
            continue  # no better than the best so far
        while high - low > 1e-4 * high:
            middle = (low + high) / 2
            fits = ring.seconds(middle) <= middle
            low, high = (low, middle) if fits else (middle, high)
        best = min(best, Limit(low, width), key=lambda limit: limit.seconds)
    return best


@dataclass(frozen=True, slots=True)
class _Ring:
    """Longest sequence on ``width`` pipelines. It takes ``tall`` seconds on each, including ``backward`` seconds."""

    num_stages: int
    work: float
    num_ranks: int
    width: int
    tall: float
    backward: float

    def seconds(self, step: float) -> float:
        """Return the least time of the ring's pipelines if all other pipelines work for the whole ``step``."""
        total = max((self.work - (self.num_ranks - self.width) * step) / self.width, self.tall) / self.tall
        below = max(point for point in _GRID if point <= total or point == _GRID[0])
        return self.tall * least_time(self.num_stages, below, round(self.backward / self.tall, 3))
