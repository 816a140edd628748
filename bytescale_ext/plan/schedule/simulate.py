"""Simulation: the longest path through a graph of work, and schedules of slices as such a graph.

``WorkGraph`` is the only event-driven engine of the project. ``simulate_slices`` runs a pipeline schedule on it, and
``plan.evaluate.replay`` runs the plan of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from bytescale_ext.errors import PlanError
from bytescale_ext.plan.schedule.actions import Action, SliceSchedule

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

ActionCost = Callable[[int, Action], float]
"""Function from (stage, action) to the cost of the action, in any unit."""


@dataclass(frozen=True, eq=False)
class WorkGraph:
    """A graph of work. ``afters[edge]`` starts at least ``delays[edge]`` after ``befores[edge]`` stops.

    Attributes:
        seconds: time of each node: [nodes].
        befores, afters: nodes of each edge; edges may repeat: [edges].
        delays: delay of each edge: [edges].
    """

    seconds: Floats
    befores: Ints
    afters: Ints
    delays: Floats

    def run(self) -> tuple[Floats, npt.NDArray[np.bool_]]:
        """Return the earliest start of each node, and whether the node can never start: [nodes] each."""
        num_nodes = len(self.seconds)
        by_before = np.argsort(self.befores, kind="stable")
        afters, delays = self.afters[by_before], self.delays[by_before]
        sizes = np.bincount(self.befores, minlength=num_nodes)
        firsts = np.cumsum(sizes) - sizes
        missing = np.bincount(self.afters, minlength=num_nodes)
        starts = np.zeros(num_nodes)
        is_left = np.ones(num_nodes, dtype=np.bool_)
        ready = np.flatnonzero(missing == 0)
        while len(ready):  # all ready nodes run in one array operation
            is_left[ready] = False
            counts = sizes[ready]
            edges = np.repeat(firsts[ready] - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
            reached = afters[edges]
            arrivals = np.repeat(starts[ready] + self.seconds[ready], counts) + delays[edges]
            np.maximum.at(starts, reached, arrivals)
            np.subtract.at(missing, reached, 1)
            ready = np.unique(reached[missing[reached] == 0])
        return starts, is_left


@dataclass(frozen=True, slots=True)
class TimedAction:
    """An action of a stage with its start and stop."""

    stage: int
    action: Action
    start: float
    stop: float


@dataclass(frozen=True, slots=True)
class SimulatedSchedule:
    """A schedule with times.

    Attributes:
        actions: actions of all stages, stage by stage, in running order.
        makespan: time at which the last action stops; the first action starts at 0.
        busy: working time of each stage.
    """

    actions: tuple[TimedAction, ...]
    makespan: float
    busy: tuple[float, ...]

    @property
    def bubble(self) -> float:
        """Share of idle time in the time of all stages."""
        return 1.0 - sum(self.busy) / (len(self.busy) * self.makespan)


def simulate_slices(schedule: SliceSchedule, cost: ActionCost) -> SimulatedSchedule:
    """Run every action as early as its stage and its inputs allow. Messages take no time.

    Raises:
        PlanError: stages wait for each other in a circle, or for an action that no stage runs.
    """
    work = [(stage, action) for stage, row in enumerate(schedule.stages) for action in row]
    costs = [cost(stage, action) for stage, action in work]
    missing = len(work)  # a node that waits for itself: it stands for every input that no stage computes
    nodes = {key: node for node, key in enumerate(work)}
    edges = [(node, node + 1) for node in range(missing - 1) if work[node][0] == work[node + 1][0]]
    edges += [(nodes.get(key, missing), node) for own, node in nodes.items() for key in input_actions(schedule, *own)]
    befores, afters = np.array([*edges, (missing, missing)]).T
    graph = WorkGraph(np.array([*costs, 0.0]), befores, afters, np.zeros(len(befores)))
    starts, is_left = (values.tolist() for values in graph.run())
    rows = list(pairwise(accumulate(map(len, schedule.stages), initial=0)))
    stuck = [next(node for node in range(*row) if is_left[node]) for row in rows if any(is_left[slice(*row)])]
    if stuck:
        text = ", ".join(f"stage {work[node][0]} before {work[node][1]}" for node in stuck)
        raise PlanError(f"stages wait for each other forever: {text}\n{schedule}")
    timed = tuple(
        TimedAction(*key, start, start + length) for key, start, length in zip(work, starts, costs, strict=False)
    )
    busy = np.bincount([stage for stage, _ in work], weights=costs, minlength=schedule.num_stages)
    return SimulatedSchedule(timed, max(action.stop for action in timed), tuple(busy.tolist()))


def input_actions(schedule: SliceSchedule, stage: int, action: Action) -> Iterator[tuple[int, Action]]:
    """Yield (stage, action) of the actions whose outputs an action takes.

    A pass takes the output of the neighbouring stage. A backward pass also takes the output of its own forward pass,
    and weight gradients take the output of their backward pass. Keys and values of earlier slices, and their gradients
    from later slices, are on the same stage, so the stage's order covers them.
    """
    if action.kind == "W":
        yield stage, action._replace(kind="B")
        return
    last = schedule.num_stages - 1
    step = -1 if action.kind == "F" else 1
    neighbour, chunk = stage + step, action.chunk
    if not 0 <= neighbour <= last:
        neighbour, chunk = (last, chunk - 1) if action.kind == "F" else (0, chunk + 1)
    if 0 <= chunk < schedule.num_chunks:
        yield neighbour, action._replace(chunk=chunk)
    if action.kind == "B":
        yield stage, action._replace(kind="F")


def peak_in_flight(
    schedule: SliceSchedule,
    stage: int,
    weights: Sequence[float] | None = None,
    sum_weights: Sequence[float] | None = None,
) -> float:
    """Return the peak of what a stage holds, in slices or in the unit of the weights.

    Args:
        schedule: the schedule.
        stage: the stage.
        weights: amount that each slice holds from its forward to its backward pass, or, with zero bubble, to its weight
            gradients; None: 1 each.
        sum_weights: amount of each slice's gradient sums of keys, from the backward pass of the micro-batch's last
            slice to its own backward pass; None: 0 each.
    """
    held = peak = 0.0
    last = "W" if schedule.slicing.zero_bubble else "B"
    for action in schedule.stages[stage]:
        index = action.slice_index
        weight = 1.0 if weights is None else weights[index]
        held += {"F": weight, last: -weight}.get(action.kind, 0.0)
        if sum_weights is not None and action.kind == "B":
            held += sum(sum_weights[:index]) if index == schedule.num_slices - 1 else -sum_weights[index]
        peak = max(peak, held)
    return peak
