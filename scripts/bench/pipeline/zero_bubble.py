"""Simulate what a zero-bubble Seq1F1B would gain (Qi et al. 2023, ZB-H1).

The backward pass of a slice is split into input gradients, which the previous stage needs, and weight gradients, which
can wait and fill idle time. Attention has no weights, so long sequences leave little work to move. Training has no such
schedule: docs/seq1f1b.md says why.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from bytescale_ext.plan.schedule.actions import Action, SliceSchedule
from bytescale_ext.plan.schedule.compare import SliceModel
from bytescale_ext.plan.schedule.simulate import needs, peak_held
from bytescale_ext.plan.schedule.slices import layer_cost, slice_costs, slice_ranges

WEIGHT_SHARE: Final = 0.5
"""Weight gradients' share of the linear part of a backward pass: one of two matrix products of equal size."""


Stops = dict[tuple[int, Action], float]
"""When each action of each stage stops."""


@dataclass(frozen=True, slots=True)
class SplitCosts:
    """Cost of each slice: forward, input gradients, weight gradients."""

    forward: tuple[float, ...]
    inputs: tuple[float, ...]
    weights: tuple[float, ...]


def split_costs(model: SliceModel, lengths: Sequence[int]) -> SplitCosts:
    """Return the costs of one layer; the share of idle time is the same for any number of layers."""
    cost = layer_cost(model.shape, "time", model.measured)
    weights = tuple(WEIGHT_SHARE * cost.backward.b * part.num_tokens for part in slice_ranges(lengths))
    backward = slice_costs(lengths, cost.backward)
    inputs = tuple(both - weight for both, weight in zip(backward, weights, strict=True))
    return SplitCosts(slice_costs(lengths, cost.forward), inputs, weights)


def zero_bubble_share(schedule: SliceSchedule, costs: SplitCosts) -> float:
    """Return the share of idle time when weight gradients fill gaps.

    Each stage keeps the schedule's order. While it waits for an action's input it runs deferred weight gradients,
    oldest first, as long as half of one fits. It also runs them before a forward that would make it hold more slices
    than stage 0 holds without them.
    """
    most_held = peak_held(schedule, 0)
    stages = [_Stage(most_held) for _ in schedule.stages]
    stops: Stops = {}
    num_done = -1
    while num_done < len(stops):
        num_done = len(stops)
        for number, stage in enumerate(stages):
            _run_what_can(schedule, number, stage, stops, costs)
    makespan = max(stage.clock + sum(stage.waiting) for stage in stages)
    busy = (
        schedule.num_micro_batches * schedule.num_chunks * sum(map(sum, (costs.forward, costs.inputs, costs.weights)))
    )
    return 1.0 - busy / makespan


def _run_what_can(schedule: SliceSchedule, number: int, stage: _Stage, stops: Stops, costs: SplitCosts) -> None:
    """Run the actions of a stage until the inputs of one are missing."""
    for action in schedule.stages[number][stage.num_done :]:
        before = list(needs(schedule, number, action))
        if not all(need in stops for need in before):
            return
        ready = max((stops[need] for need in before), default=0.0)
        stops[number, action] = stage.run(action.kind == "F", action.slice_index, ready, costs)


class _Stage:
    """The clock of one stage and its deferred weight gradients."""

    def __init__(self, most_held: float) -> None:
        self.clock = 0.0
        self.num_done = 0
        self.num_held = 0
        self.most_held = most_held
        self.waiting: deque[float] = deque()

    def run(self, is_forward: bool, index: int, ready: float, costs: SplitCosts) -> float:
        """Run the next action after weight gradients that fit before it, and return when it stops."""
        while self.waiting and (
            self.clock + self.waiting[0] / 2 < ready or (is_forward and self.num_held >= self.most_held)
        ):
            self.clock += self.waiting.popleft()
            self.num_held -= 1
        self.clock = max(self.clock, ready) + (costs.forward if is_forward else costs.inputs)[index]
        self.num_done += 1
        if is_forward:
            self.num_held += 1
        else:
            self.waiting.append(costs.weights[index])
        return self.clock
