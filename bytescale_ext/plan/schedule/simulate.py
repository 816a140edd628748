"""When work starts and stops: the longest path through a graph of work, and schedules of slices as such a graph.

``WorkGraph`` is the one event-driven engine of the project. ``simulate_slices`` runs a pipeline schedule on it, and
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
"""(stage, action) -> what it costs, in any unit."""


@dataclass(frozen=True, eq=False)
class WorkGraph:
    """Work that takes ``seconds[node]`` and starts ``delays[edge]`` after the work before it stops.

    ``befores[edge]`` must stop before ``afters[edge]`` may start; edges may repeat. Shapes: [nodes], and [edges] three
    times.
    """

    seconds: Floats
    befores: Ints
    afters: Ints
    delays: Floats

    def run(self) -> tuple[Floats, npt.NDArray[np.bool_]]:
        """Return the earliest starts, and which nodes can never start: [nodes] both."""
        num_nodes = len(self.seconds)
        in_order = np.argsort(self.befores, kind="stable")
        afters, delays = self.afters[in_order], self.delays[in_order]
        sizes = np.bincount(self.befores, minlength=num_nodes)
        firsts = np.cumsum(sizes) - sizes
        missing = np.bincount(self.afters, minlength=num_nodes)
        starts = np.zeros(num_nodes)
        left = np.ones(num_nodes, dtype=np.bool_)
        ready = np.flatnonzero(missing == 0)
        while len(ready):  # all that is ready runs in one array operation
            left[ready] = False
            counts = sizes[ready]
            edges = np.repeat(firsts[ready] - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
            reached = afters[edges]
            arrivals = np.repeat(starts[ready] + self.seconds[ready], counts) + delays[edges]
            np.maximum.at(starts, reached, arrivals)
            np.subtract.at(missing, reached, 1)
            ready = np.unique(reached[missing[reached] == 0])
        return starts, left


@dataclass(frozen=True, slots=True)
class TimedAction:
    """An action of a stage with its start and stop."""

    stage: int
    action: Action
    start: float
    stop: float


@dataclass(frozen=True, slots=True)
class Simulated:
    """A schedule with times.

    Attributes:
        actions: of all stages, by stage and in their order.
        makespan: when the last one stops; the first starts at 0.
        busy: working time of each stage.
    """

    actions: tuple[TimedAction, ...]
    makespan: float
    busy: tuple[float, ...]

    @property
    def bubble(self) -> float:
        """Share of all stages' time that is idle."""
        return 1.0 - sum(self.busy) / (len(self.busy) * self.makespan)


def simulate_slices(schedule: SliceSchedule, cost: ActionCost) -> Simulated:
    """Run every action as early as its stage and its inputs allow; a message takes no time.

    Raises:
        PlanError: stages wait for each other in a circle, or for an action that no stage runs.
    """
    work = [(stage, action) for stage, row in enumerate(schedule.stages) for action in row]
    lengths = [cost(stage, action) for stage, action in work]
    never = len(work)  # a node that waits for itself, in place of every needed action that no stage runs
    nodes = {key: node for node, key in enumerate(work)}
    edges = [(node, node + 1) for node in range(never - 1) if work[node][0] == work[node + 1][0]]
    edges += [(nodes.get(need, never), node) for key, node in nodes.items() for need in needs(schedule, *key)]
    befores, afters = np.array([*edges, (never, never)]).T
    graph = WorkGraph(np.array([*lengths, 0.0]), befores, afters, np.zeros(len(befores)))
    starts, left = (values.tolist() for values in graph.run())
    offsets = list(accumulate(map(len, schedule.stages), initial=0))
    rows = list(pairwise(offsets))
    stuck = [next(node for node in range(*row) if left[node]) for row in rows if any(left[slice(*row)])]
    if stuck:
        where = ", ".join(f"stage {work[node][0]} before {work[node][1]}" for node in stuck)
        raise PlanError(f"stages wait for each other for ever: {where}\n{schedule}")
    timed = tuple(
        TimedAction(*key, start, start + length) for key, start, length in zip(work, starts, lengths, strict=False)
    )
    busy = np.bincount([stage for stage, _ in work], weights=lengths, minlength=schedule.num_stages)
    return Simulated(timed, max(one.stop for one in timed), tuple(busy.tolist()))


def needs(schedule: SliceSchedule, stage: int, action: Action) -> Iterator[tuple[int, Action]]:
    """Yield (stage, action) of the outputs that an action takes: its neighbour's, and for a backward its own forward's.

    Weight gradients take what the backward pass of their slice leaves.
    Keys and values of earlier slices, and their gradients from later slices, are on the same stage, whose order covers
    them.
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


def peak_held(
    schedule: SliceSchedule,
    stage: int,
    weights: Sequence[float] | None = None,
    sum_weights: Sequence[float] | None = None,
) -> float:
    """Return the most that a stage holds at once.

    Args:
        schedule: what the stages run.
        stage: the stage.
        weights: of what each slice holds from its forward to its backward pass, or to its weight gradients where these
            run by themselves; None: 1 each.
        sum_weights: of the sums of key gradients of each slice, from the backward pass of the micro-batch's last slice
            to its own; None: 0 each.
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
