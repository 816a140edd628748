"""Find the fastest strategies: the most promising one is tried on its next step until the best have run all steps.

A strategy's optimistic time is the mean of the steps that it has run and of bounds of those that it has not: first of
the work alone, which costs next to nothing, then of ``evaluate/bounds.py``. The strategy with the least optimistic time
goes next. So the first to finish is the fastest of all, the second to finish is the second, and a strategy whose bound
is above those times is never planned. Most others run one step only, as in successive halving, but none is lost.

Steps may come in several sizes, which cut the same documents into steps. A strategy then competes in each of them, by
the time that all documents take.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from bytescale_ext.plan.search.case import Case, StepFigures, Task, Unfit
from bytescale_ext.plan.search.strategy import Strategy


@dataclass(frozen=True, slots=True)
class Scored:
    """A strategy that ran all steps.

    Attributes:
        strategy: the strategy.
        steps: figures of each step.
        task: with these steps.
    """

    strategy: Strategy
    steps: tuple[StepFigures, ...]
    task: Task

    def mean(self, name: str) -> float:
        """Return the mean of a figure over the steps."""
        return float(np.mean([getattr(step, name) for step in self.steps]))

    def most(self, name: str) -> float:
        """Return the greatest value of a figure."""
        return max(float(getattr(step, name)) for step in self.steps)

    @property
    def seconds(self) -> float:
        """Mean time of a step."""
        return self.mean("seconds")

    @property
    def median_seconds(self) -> float:
        """Median time of a step."""
        return float(np.median([step.seconds for step in self.steps]))

    @property
    def slow_seconds(self) -> float:
        """The time that 95 % of the steps do not exceed."""
        return float(np.quantile([step.seconds for step in self.steps], 0.95))


@dataclass(frozen=True, order=True)
class Candidate:
    """A strategy that waits for its next step; the least goes first, ties go to the earlier strategy.

    Attributes:
        seconds: optimistic time of as many documents as the largest steps have.
        number: of the strategy in a size of steps.
        case: the strategy.
        task: with the steps.
        scale: steps of this size for one of the largest.
        bounds: of each step; empty until they are computed.
        steps: figures of the steps that it has run.
    """

    seconds: float
    number: int
    case: Case = field(compare=False)
    task: Task = field(compare=False)
    scale: float = field(compare=False)
    bounds: tuple[float, ...] = field(compare=False, default=())
    steps: tuple[StepFigures, ...] = field(compare=False, default=())

    def after(self) -> Candidate:
        """Return the candidate that knows its bounds or, if it does, one more step."""
        if not self.bounds:
            bounds = tuple(self.case.bound(step) for step in self.task.steps)
            return replace(self, bounds=bounds, seconds=max(self.seconds, self.scale * float(np.mean(bounds))))
        steps = (*self.steps, self.case.run(self.task.steps[len(self.steps)]))
        optimistic = [*(step.seconds for step in steps), *self.bounds[len(steps) :]]
        return replace(self, steps=steps, seconds=self.scale * float(np.mean(optimistic)))


@dataclass
class Exploration:
    """How far a search is.

    Attributes:
        unfit: number of strategies that do not fit, by reason.
        needed: the least device memory that a strategy needs that does not fit, and the strategy; None: not known.
        fitting: number of strategies that fit.
        bounded: number of those whose bounds were computed, in each size of steps.
        replayed: number of those that ran at least one step.
        steps_run: steps that strategies ran.
        found: strategies that ran all steps, fastest first.
        waiting: those that did not, unordered.
    """

    unfit: Counter[str] = field(default_factory=Counter)
    needed: tuple[float, Strategy] | None = None
    fitting: int = 0
    bounded: int = 0
    replayed: int = 0
    steps_run: int = 0
    found: list[Scored] = field(default_factory=list)
    waiting: list[Candidate] = field(default_factory=list)


def explore(tasks: Sequence[Task], strategies: Iterable[Strategy], count: int = 10) -> Iterator[Exploration]:
    """Search the ``count`` fastest strategies; yield at the start, after each bound or step, and at the end.

    What is yielded is always the same object, so that an interrupted search has what was found.

    Args:
        tasks: equal but for their steps, which cut the same documents into steps of several sizes. The documents of
            each size divide among the same ranks, so what fits one fits all. Ties go to the earlier one.
        strategies: of any of the tasks.
        count: how many to find.
    """
    seen = Exploration()
    yield seen
    fewest = min(len(task.steps) for task in tasks)
    work = [
        [(float(sum(step)), float(sum(length * length for length in step))) for step in task.steps] for task in tasks
    ]
    for case in fitting_cases(tasks[0], strategies, seen):
        for task, of_steps in zip(tasks, work, strict=True):
            scale, number = len(task.steps) / fewest, len(seen.waiting)
            seen.waiting.append(Candidate(scale * case.least_seconds(of_steps), number, case, task, scale))
    heapq.heapify(seen.waiting)
    while seen.waiting and len(seen.found) < count:
        one = heapq.heappop(seen.waiting)
        if len(one.steps) == len(one.task.steps):
            seen.found.append(Scored(one.case.strategy, one.steps, one.task))
            continue
        seen.bounded += not one.bounds
        seen.replayed += bool(one.bounds and not one.steps)
        seen.steps_run += bool(one.bounds)
        heapq.heappush(seen.waiting, one.after())
        yield seen
    yield seen


def in_sizes(task: Task, sizes: Sequence[int]) -> list[Task]:
    """Return a task with its documents in steps of each of these sizes, which divide its own."""
    return [
        replace(
            task, steps=tuple(step[first : first + size] for step in task.steps for first in range(0, len(step), size))
        )
        for size in sizes
    ]


def fitting_cases(task: Task, strategies: Iterable[Strategy], seen: Exploration) -> Iterator[Case]:
    """Yield the strategies that fit, and count them and the others in ``seen``."""
    for strategy in strategies:
        try:
            case = Case.of(task, strategy)
        except Unfit as error:
            seen.unfit[str(error)] += 1
            if error.needed_bytes and (seen.needed is None or error.needed_bytes < seen.needed[0]):
                seen.needed = error.needed_bytes, strategy
            continue
        seen.fitting += 1
        yield case
