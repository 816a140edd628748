"""Search of the fastest strategies: the most promising strategy runs its next step, until the best have run all steps.

Strategies come in branches, which are closed at first (``space.py``). The branch with the smallest bound opens if no
strategy is more promising. Strategies of closed branches are never built.

A strategy's optimistic time is the mean over all steps: the time of steps that it has run, and a lower bound of other
steps. The bound first counts only the work, which is cheap, and later comes from ``evaluate/bounds.py``. The strategy
with the smallest optimistic time runs next. So the first to finish is the fastest of all, the second to finish is the
second, and a strategy with a bound above those times is never planned. Most other strategies run only one step, as in
successive halving, but no fast strategy is lost.

Steps may have several sizes, which divide the same documents. A strategy then competes with each size, by the time of
all documents.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from bytescale_ext.plan.search.costed import CostedStrategy, StepFigures
from bytescale_ext.plan.search.space import Branch
from bytescale_ext.plan.search.strategy import Strategy
from bytescale_ext.plan.search.task import DoesNotFit, Task

LEAST_GAIN: Final = 0.01
"""A strategy is on the frontier if it is faster by this fraction than all strategies with at most its device memory."""


@dataclass(frozen=True, slots=True)
class ScoredStrategy:
    """A strategy that ran all steps.

    Attributes:
        strategy: strategy that ran.
        steps: figures of each step.
        task: task with these steps.
    """

    strategy: Strategy
    steps: tuple[StepFigures, ...]
    task: Task

    def mean(self, name: str) -> float:
        """Return the mean of a part of the time over the steps."""
        return float(np.mean([getattr(step.time, name) for step in self.steps]))

    def most(self, name: str) -> float:
        """Return the largest value of a figure."""
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
        """Time that 95 % of the steps do not exceed."""
        return float(np.quantile([step.seconds for step in self.steps], 0.95))


@dataclass(frozen=True, order=True)
class Candidate:
    """Strategy that waits for its next step. The smallest candidate runs first; among equals, the earlier strategy.

    Attributes:
        seconds: optimistic time of as many documents as the largest steps have.
        number: numbers of the branch, of the strategy in it, and of the size of steps.
        case: costed strategy.
        task: task with its steps.
        scale: number of steps of this size per step of the largest size.
        bounds: lower bound of each step; empty until computed.
        steps: figures of the steps that it has run.
    """

    seconds: float
    number: tuple[int, int, int]
    case: CostedStrategy = field(compare=False)
    task: Task = field(compare=False)
    scale: float = field(compare=False)
    bounds: tuple[float, ...] = field(compare=False, default=())
    steps: tuple[StepFigures, ...] = field(compare=False, default=())

    @property
    def scored(self) -> ScoredStrategy | None:
        """Scored strategy if all steps have run, else None."""
        if len(self.steps) < len(self.task.steps):
            return None
        return ScoredStrategy(self.case.strategy, self.steps, self.task)

    def after(self) -> Candidate:
        """Return the candidate with computed bounds or, if it has them, with one more step."""
        if not self.bounds:
            bounds = tuple(self.case.bound(step) for step in self.task.steps)
            return replace(self, bounds=bounds, seconds=max(self.seconds, self.scale * float(np.mean(bounds))))
        steps = (*self.steps, self.case.run(self.task.steps[len(self.steps)]))
        optimistic = [*(step.seconds for step in steps), *self.bounds[len(steps) :]]
        return replace(self, steps=steps, seconds=self.scale * float(np.mean(optimistic)))


@dataclass(frozen=True, order=True)
class ClosedBranch:
    """A branch that was not opened. The branch with the smallest bound opens first.

    Attributes:
        seconds: bound of the branch, for as many documents as the largest steps have.
        number: number of the branch.
        branch: strategies of the branch.
    """

    seconds: float
    number: int
    branch: Branch = field(compare=False)


@dataclass
class Exploration:
    """State of a search.

    Attributes:
        branches: number of branches.
        closed: branches that were not opened, unordered.
        unfit: number of strategies of open branches that do not fit, by reason.
        needed: smallest device memory that an unfit strategy needs, and the strategy; None if unknown.
        fitting: number of strategies of open branches that fit.
        bounded: number of fitting strategies with computed bounds, counted for each size of steps.
        replayed: number of fitting strategies that ran at least one step.
        steps_run: number of steps that strategies ran.
        found: strategies that ran all steps, fastest first.
        waiting: strategies that have not run all steps, unordered.
    """

    branches: int = 0
    closed: list[ClosedBranch] = field(default_factory=list)
    unfit: Counter[str] = field(default_factory=Counter)
    needed: tuple[float, Strategy] | None = None
    fitting: int = 0
    bounded: int = 0
    replayed: int = 0
    steps_run: int = 0
    found: list[ScoredStrategy] = field(default_factory=list)
    waiting: list[Candidate] = field(default_factory=list)


@dataclass(frozen=True)
class _Size:
    """Steps of one size.

    Attributes:
        task: task with its steps.
        scale: number of steps of this size per step of the largest size.
        work: tokens, and the sum of the squares of the lengths, of each step.
    """

    task: Task
    scale: float
    work: list[tuple[float, float]]

    @classmethod
    def of(cls, task: Task, fewest_steps: int) -> _Size:
        work = [(float(sum(step)), float(sum(length * length for length in step))) for step in task.steps]
        return cls(task, len(task.steps) / fewest_steps, work)


def explore(
    tasks: Sequence[Task], branches: Iterable[Branch], count: int = 10, opens_all: bool = False
) -> Iterator[Exploration]:
    """Search the ``count`` fastest strategies; yield at the start, after each branch, bound or step, and at the end.

    Each yield returns the same object, so an interrupted search keeps its results.

    Args:
        tasks: tasks that differ only in their steps, which divide the same documents into steps of several sizes. The
            documents of each size divide among the same ranks, so a strategy fits all tasks or none. Among equal times
            the earlier task wins.
        branches: branches of any of the tasks.
        count: number of strategies to find.
        opens_all: open all branches first, so that all strategies that fit are known.
    """
    seen = Exploration()
    yield seen
    sizes = [_Size.of(task, min(len(task.steps) for task in tasks)) for task in tasks]
    for branch in branches:
        bounds = (0.0 if opens_all else size.scale * branch.least_seconds(size.task, size.work) for size in sizes)
        seen.closed.append(ClosedBranch(min(bounds), seen.branches, branch))
        seen.branches += 1
    heapq.heapify(seen.closed)
    while (seen.closed or seen.waiting) and len(seen.found) < count:
        if _opens(seen):
            _open(seen, heapq.heappop(seen.closed), sizes)
            yield seen
            continue
        candidate = heapq.heappop(seen.waiting)
        if candidate.scored is not None:
            seen.found.append(candidate.scored)
            continue
        seen.bounded += not candidate.bounds
        seen.replayed += bool(candidate.bounds and not candidate.steps)
        seen.steps_run += bool(candidate.bounds)
        heapq.heappush(seen.waiting, candidate.after())
        yield seen
    yield seen


def _opens(seen: Exploration) -> bool:
    """Return whether a branch is more promising than all strategies that wait."""
    if not seen.closed or not seen.waiting:
        return bool(seen.closed)
    branch, candidate = seen.closed[0], seen.waiting[0]
    return (branch.seconds, branch.number) <= (candidate.seconds, candidate.number[0])


def _open(seen: Exploration, closed: ClosedBranch, sizes: Sequence[_Size]) -> None:
    """Add the fitting strategies of a branch to the strategies that wait."""
    for place, case in enumerate(fitting_cases(sizes[0].task, closed.branch.strategies, seen)):
        for number, size in enumerate(sizes):
            seconds = max(closed.seconds, size.scale * case.least_seconds(size.work))
            candidate = Candidate(seconds, (closed.number, place, number), case, size.task, size.scale)
            heapq.heappush(seen.waiting, candidate)


def in_sizes(task: Task, sizes: Sequence[int]) -> list[Task]:
    """Return a task with its documents in steps of each of these sizes, which divide its own."""
    return [
        replace(
            task, steps=tuple(step[first : first + size] for step in task.steps for first in range(0, len(step), size))
        )
        for size in sizes
    ]


def fitting_cases(task: Task, strategies: Iterable[Strategy], seen: Exploration) -> Iterator[CostedStrategy]:
    """Yield the strategies that fit, and count all strategies in ``seen``."""
    for strategy in strategies:
        try:
            case = CostedStrategy.of(task, strategy)
        except DoesNotFit as error:
            seen.unfit[str(error)] += 1
            if error.needed_bytes and (seen.needed is None or error.needed_bytes < seen.needed[0]):
                seen.needed = error.needed_bytes, strategy
            continue
        seen.fitting += 1
        yield case


def waiting_whole(seen: Exploration, batch: int) -> list[Candidate]:
    """Return the strategies with ``batch`` documents a step that did not run all steps, by device memory.

    Strategies with slices chosen by the planner are left out, because their memory is known only after planning.
    """
    whole = [
        candidate
        for candidate in seen.waiting
        if candidate.task.batch == batch and not candidate.case.strategy.chooses_slices
    ]
    return sorted(whole, key=lambda candidate: (candidate.case.full_bytes[0], candidate))


def run_frontier(seen: Exploration, batch: int) -> Iterator[Candidate]:
    """Run the strategies of ``waiting_whole`` that may be on the frontier; yield each after each bound or step.

    Strategies that the search has finished count as well, but are not yielded. ``batch``: documents of a step.
    """
    known = sorted((scored.most("device_bytes"), scored.seconds) for scored in seen.found if scored.task.batch == batch)
    least = float("inf")
    for candidate in waiting_whole(seen, batch):
        while known and known[0][0] <= candidate.case.full_bytes[0]:
            least = min(least, known.pop(0)[1])
        while candidate.scored is None and candidate.seconds / candidate.scale < least * (1 - LEAST_GAIN):
            candidate = candidate.after()
            yield candidate
        if candidate.scored is not None:
            least = min(least, candidate.scored.seconds)
