"""The balance planner for aligned slots: pipelines, virtual stages, expert parallelism.

The time of a pipeline is more than the sum of its slots: fill and drain cost time too, and a tall slot costs
``num_stages - 1`` times its height again where its neighbours are lower. So rings are as wide as their exchange allows,
shelves of one height span many ranks (``shelves``), shelves rise to the tallest and fall after it, the first and last
slots hold few short sequences, and ranks with tall slots get less work in total. How much of each is best depends on
the lengths: a few dozen layouts are built (``build``) and timed (``clock``), and the fastest is taken.

Slices (Seq1F1B) make fill and drain k times shorter, so a tall slot costs less; but where keys are not kept, each
slice exchanges the keys of all tokens before it, so rings are narrower. A layout that is good in some slices is often
good in others, so where a step is placed in several, each search begins with the best layouts of those before it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from bytescale_ext.plan.hdp.aligned.layouts import SLICED_STARTS, STARTS, Layout, variations
from bytescale_ext.plan.hdp.aligned.plans import MOST_WORK, LayoutPlan, built_plans, leveled_plans
from bytescale_ext.plan.hdp.aligned.shelving import Shelver, Shelving
from bytescale_ext.plan.hdp.aligned.step import AlignedStep
from bytescale_ext.plan.hdp.deadline import ShouldStop, stop_if
from bytescale_ext.plan.hdp.problem import Problem
from bytescale_ext.plan.step.placed import PlacedRanks

_MOST_LAYOUTS = 32  # of a search; those that make the same plan count once
_FEW_LAYOUTS = 5  # of a search that begins with layouts of other searches, until it is to be thorough
_GOOD = 1.01  # a plan this near to the lower bound ends the search
_RANKS_TOGETHER = 1024  # about so many ranks of several plans are timed together: array operations take long to start
_WORK_TOGETHER = 4_000_000  # array entries that these plans touch
_LEVELED_RANKS = 128  # about so many ranks of the best plans are leveled together
_MOST_LEVELED = 8  # plans that are leveled


class PipelinedPlacer:
    """Places one step in aligned slots for the shortest time of all pipelines.

    It may be called for problems that differ in slices and costs; what it returns depends on those before.
    """

    def __init__(self, should_stop: ShouldStop = None) -> None:
        self._should_stop = should_stop
        self._searches: dict[tuple[object, ...], LayoutSearch] = {}

    def __call__(self, problem: Problem, thorough: bool) -> PlacedRanks:
        """Return the best placement so far.

        Args:
            problem: the step.
            thorough: search for the best layout; otherwise try those alone that a search begins with.
        """
        lengths = problem.lengths
        if not len(lengths):
            return PlacedRanks(problem.num_ranks, lengths, lengths, lengths, lengths, aligned=True)
        ordered, in_order = problem.longest_first()
        key = (problem.slicing, problem.stages)
        if key not in self._searches:
            self._searches[key] = self._begun(AlignedStep(ordered))
        search = self._searches[key]
        if thorough:
            search.complete()
        placed, back = search.best.placed, np.argsort(in_order, kind="stable")
        return replace(
            placed,
            lengths=lengths,
            first_ranks=placed.first_ranks[back],
            widths=placed.widths[back],
            orders=placed.orders[back],
        )

    def _begun(self, step: AlignedStep) -> LayoutSearch:
        """Return a search that has tried the layouts that did best in searches of the same kind, if there are any."""
        search = LayoutSearch(step, self._should_stop)
        others = [other for other in self._searches.values() if other.starts == search.starts]
        if others:
            search.try_layouts(_best_first(others), _FEW_LAYOUTS)
        else:
            search.try_layouts(search.starts, _MOST_LAYOUTS)
        return search


def _best_first(searches: Iterable[LayoutSearch]) -> list[Layout]:
    """Return the layouts of all searches, best first: by the time of a plan over that of the best in its search."""
    plans = [(plan.seconds / search.best.seconds, plan) for search in searches for plan in search.plans]
    return [plan.shelving.layout for _, plan in sorted(plans, key=lambda pair: pair[0])]


class LayoutSearch:
    """The search for the layout of a step whose plan takes the least time."""

    def __init__(self, step: AlignedStep, should_stop: ShouldStop = None) -> None:
        self._step, self._should_stop = step, should_stop
        self._shelver = Shelver(step)
        self._seen: set[Layout] = set()
        self._plans: dict[tuple[object, ...], LayoutPlan] = {}  # by the keys of their shelvings
        self._is_complete = False
        self._bound = max(step.problem.mean_seconds(), (1 + step.fill) * step.problem.longest_seconds())
        self._together = max(1, min(_RANKS_TOGETHER // step.num_ranks, _WORK_TOGETHER // step.least_size))

    @property
    def starts(self) -> tuple[Layout, ...]:
        """The layouts to try first, unless those that are good in other slices are known."""
        return STARTS if self._step.problem.slicing.num_slices == 1 else SLICED_STARTS

    @property
    def plans(self) -> Iterable[LayoutPlan]:
        """The plans that were built."""
        return self._plans.values()

    @property
    def best(self) -> LayoutPlan:
        """The fastest of at least one plan; of equal ones the first."""
        return min(self.plans, key=lambda plan: plan.seconds)

    def try_layouts(self, layouts: Iterable[Layout], most: int) -> None:
        """Build the plans of layouts, at most so many that no layout before has made."""
        most = min(len(self._plans) + most, _MOST_LAYOUTS)
        batch: dict[tuple[object, ...], Shelving] = {}
        for layout in self._unseen(layouts):
            if self._is_enough or len(self._plans) + len(batch) >= most:
                break
            stop_if(self._should_stop)
            self._seen.add(layout)
            shelving = self._shelver(layout)
            if shelving.key not in self._plans:
                batch[shelving.key] = shelving
            if len(batch) == self._together:
                self._build(batch)
                batch = {}
        self._build(batch)

    def complete(self) -> None:
        """Change one attribute of the best layout at a time and keep each improvement; then level the best plans."""
        if self._is_complete:
            return
        self._is_complete = True
        while len(self._plans) < _MOST_LAYOUTS and not self._is_enough:
            tries = self._unseen(variations(self.best.shelving.layout))
            if not tries:
                break
            self.try_layouts(tries, _MOST_LAYOUTS)
        if not self._is_enough and self._step.num_ranks > 1:
            self._level()

    @property
    def _is_enough(self) -> bool:
        """Whether the best plan is good, or the search has taken long."""
        if not self._plans:
            return False
        return self.best.seconds <= _GOOD * self._bound or sum(plan.size for plan in self.plans) >= MOST_WORK

    def _unseen(self, layouts: Iterable[Layout]) -> list[Layout]:
        """Return the layouts that may make a plan of their own and were not seen."""
        found = dict.fromkeys(layout.on(self._step.num_ranks) for layout in layouts)
        return [layout for layout in found if layout not in self._seen]

    def _build(self, batch: dict[tuple[object, ...], Shelving]) -> None:
        """Add the plans of shelvings, as many as it would take one at a time."""
        plans = built_plans(self._step, list(batch.values())) if batch else []
        for key, plan in zip(batch, plans, strict=True):
            if self._is_enough:
                break
            self._plans[key] = plan

    def _level(self) -> None:
        """Level the best plans."""
        stop_if(self._should_stop)
        count = min(max(1, _LEVELED_RANKS // self._step.num_ranks), _MOST_LEVELED)
        keys = sorted(self._plans, key=lambda key: self._plans[key].seconds)[:count]
        self._plans.update(zip(keys, leveled_plans(self._step, [self._plans[key] for key in keys]), strict=True))
