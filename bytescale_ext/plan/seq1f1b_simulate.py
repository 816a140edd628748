"""Runs a schedule of slices on paper: when each action starts and stops, idle time, activations held."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from bytescale_ext.errors import PlanError
from bytescale_ext.plan.seq1f1b import Action, SliceSchedule

ActionCost = Callable[[int, Action], float]
"""(stage, action) -> what it costs, in any unit."""


@dataclass(frozen=True, slots=True)
class TimedAction:
    """An action of a stage, with when it starts and stops."""

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
        busy: time at work of each stage.
    """

    actions: tuple[TimedAction, ...]
    makespan: float
    busy: tuple[float, ...]

    @property
    def bubble(self) -> float:
        """Share of all stages' time that is idle."""
        return 1.0 - sum(self.busy) / (len(self.busy) * self.makespan)


def simulate_slices(schedule: SliceSchedule, cost: ActionCost) -> Simulated:
    """Every action as early as its stage and what it needs allow; a message takes no time.

    Raises:
        PlanError: stages wait for each other in a circle, or for an action that no stage runs.
    """
    stops: dict[tuple[int, Action], float] = {}
    waiting: dict[tuple[int, Action], list[int]] = {}
    clocks = [0.0] * schedule.num_stages
    busy = [0.0] * schedule.num_stages
    nexts = [0] * schedule.num_stages
    timed: list[list[TimedAction]] = [[] for _ in schedule.stages]
    ready = deque(range(schedule.num_stages))
    while ready:
        stage = ready.popleft()
        while nexts[stage] < len(schedule.stages[stage]):
            action = schedule.stages[stage][nexts[stage]]
            missing = [need for need in needs(schedule, stage, action) if need not in stops]
            if missing:
                waiting.setdefault(missing[0], []).append(stage)
                break
            start = max((stops[need] for need in needs(schedule, stage, action)), default=0.0)
            start = max(start, clocks[stage])
            length = cost(stage, action)
            stops[stage, action] = clocks[stage] = start + length
            busy[stage] += length
            timed[stage].append(TimedAction(stage, action, start, start + length))
            nexts[stage] += 1
            ready.extend(waiting.pop((stage, action), ()))
    stuck = [stage for stage in range(schedule.num_stages) if nexts[stage] < len(schedule.stages[stage])]
    if stuck:
        where = ", ".join(f"stage {stage} before {schedule.stages[stage][nexts[stage]]}" for stage in stuck)
        raise PlanError(f"stages wait for each other for ever: {where}\n{schedule}")
    return Simulated(tuple(action for stage in timed for action in stage), max(clocks), tuple(busy))


def needs(schedule: SliceSchedule, stage: int, action: Action) -> Iterator[tuple[int, Action]]:
    """The (stage, action) whose output an action takes: its neighbour's, and for a backward its own forward.

    Earlier slices' keys and values, and later slices' gradients of them, are of the same stage: its order has them.
    """
    last = schedule.num_stages - 1
    step = -1 if action.kind == "F" else 1
    neighbour, chunk = stage + step, action.chunk
    if not 0 <= neighbour <= last:
        neighbour, chunk = (last, chunk - 1) if action.kind == "F" else (0, chunk + 1)
    if 0 <= chunk < schedule.num_chunks:
        yield neighbour, action._replace(chunk=chunk)
    if action.kind == "B":
        yield stage, action._replace(kind="F")


def peak_held(schedule: SliceSchedule, stage: int, weights: Sequence[float] | None = None) -> float:
    """The most that a stage holds between forward and backward, slice i weighing ``weights[i]`` (None: 1 each)."""
    held = peak = 0.0
    for action in schedule.stages[stage]:
        weight = 1.0 if weights is None else weights[action.slice_index]
        held += weight if action.kind == "F" else -weight
        peak = max(peak, held)
    return peak
