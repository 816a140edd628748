"""The balance planner for aligned slots: pipelines, virtual stages, expert parallelism.

The time of a pipeline is more than the sum of its slots. Filling and draining the pipeline costs time, and a tall slot
among lower slots costs its height up to ``num_stages - 1`` times more. A good plan therefore has these properties:

* Rings are as wide as their exchange allows.
* Shelves of equal height span many ranks (``shelves``). They rise to the tallest shelf and fall after it.
* The first and the last slots hold few short sequences.
* Ranks with tall slots get less work in total.

How far to go with each depends on the lengths. The search builds a few dozen arrangements (``build``), times them
(``clock``) and takes the fastest.

Slices (Seq1F1B) make the ramps k times shorter, so a tall slot costs less. But unless keys are kept, each slice
exchanges the keys of all tokens before it, so rings are narrower. An arrangement that is good for some slices is often
good for others. So when a step is planned for several slicings, a search starts with the best arrangements of the
searches before it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from bytescale_ext.plan.hdp.aligned.arrangements import SLICED_STARTS, STARTS, Arrangement, variations
from bytescale_ext.plan.hdp.aligned.plans import MAX_ARRAY_ENTRIES, ArrangementPlan, build_plans, level_plans
from bytescale_ext.plan.hdp.aligned.pools import POOLS
from bytescale_ext.plan.hdp.aligned.shelving import Shelver, Shelving
from bytescale_ext.plan.hdp.aligned.step import AlignedStep
from bytescale_ext.plan.hdp.deadline import ShouldStop, stop_if
from bytescale_ext.plan.hdp.problem import Problem
from bytescale_ext.plan.step.placed import PlacedRanks

_MAX_ARRANGEMENTS = 32  # distinct plans of a search
_FEW_ARRANGEMENTS = 5  # distinct plans of a quick search that starts with arrangements of other searches
_GOOD = 1.01  # a plan within this factor of the lower bound ends the search
_BATCH_RANKS = 1024  # ranks of all plans that are timed together, because an array operation is slow to start
_BATCH_ARRAY_ENTRIES = 4_000_000  # array entries that the plans of a batch touch
_LEVELED_RANKS = 128  # ranks of all plans that are leveled together
_MAX_LEVELED = 8  # plans that are leveled


class PipelinedPlacer:
    """Places one step in aligned slots for the shortest time of all pipelines.

    The problems that it is called for may differ in slices and costs. A placement depends on the calls before it.
    """

    def __init__(self, should_stop: ShouldStop = None) -> None:
        self._should_stop = should_stop
        self._searches: dict[tuple[object, ...], ArrangementSearch] = {}

    def __call__(self, problem: Problem, thorough: bool) -> PlacedRanks:
        """Return the best placement that was found.

        Args:
            problem: the step.
            thorough: whether to complete the search; if not, only its first arrangements are tried.
        """
        lengths = problem.lengths
        if not len(lengths):
            return PlacedRanks(problem.num_ranks, lengths, lengths, lengths, lengths, aligned=True)
        ordered, in_order = problem.longest_first()
        key = (problem.slicing, problem.stages)
        if key not in self._searches:
            self._searches[key] = self._start_search(AlignedStep(ordered))
        search = self._searches[key]
        if thorough:
            search.complete()
        placed, original_order = search.best.placed, np.argsort(in_order, kind="stable")
        return replace(
            placed,
            lengths=lengths,
            first_ranks=placed.first_ranks[original_order],
            widths=placed.widths[original_order],
            orders=placed.orders[original_order],
        )

    def _start_search(self, step: AlignedStep) -> ArrangementSearch:
        """Return a search that has tried its first arrangements: the best of similar searches, or ``starts``."""
        search = ArrangementSearch(step, self._should_stop)
        similar = [other for other in self._searches.values() if other.starts == search.starts]
        if similar:
            search.try_arrangements(_best_first(similar), _FEW_ARRANGEMENTS)
        else:
            search.try_arrangements(search.starts, _MAX_ARRANGEMENTS)
        return search


def _best_first(searches: Iterable[ArrangementSearch]) -> list[Arrangement]:
    """Return the arrangements of all searches, by the time of their plan relative to the best plan of its search."""
    plans = [(plan.seconds / search.best.seconds, plan) for search in searches for plan in search.plans]
    return [plan.shelving.arrangement for _, plan in sorted(plans, key=lambda pair: pair[0])]


class ArrangementSearch:
    """The search for the fastest plan of one step."""

    def __init__(self, step: AlignedStep, should_stop: ShouldStop = None) -> None:
        self._step, self._should_stop = step, should_stop
        self._shelver = Shelver(step)
        self._tried: set[Arrangement] = set()
        self._plans: dict[tuple[object, ...], ArrangementPlan] = {}  # by the keys of their shelvings
        self._is_complete = False
        self._bound = max(step.problem.mean_seconds(), (1 + step.ramp_slots) * step.problem.longest_seconds())
        by_size = _BATCH_ARRAY_ENTRIES // step.min_array_entries
        self._batch_size = max(1, min(_BATCH_RANKS // step.num_ranks, by_size))

    @property
    def starts(self) -> tuple[Arrangement, ...]:
        """The arrangements to try first if there is no similar search."""
        problem = self._step.problem
        starts = STARTS if problem.slicing.num_slices == 1 else SLICED_STARTS
        if problem.cluster.has_equal_speeds:
            return starts
        return tuple(replace(start, pools=pools) for start in starts for pools in POOLS)

    @property
    def plans(self) -> Iterable[ArrangementPlan]:
        """All plans that were built."""
        return self._plans.values()

    @property
    def best(self) -> ArrangementPlan:
        """The fastest plan, the earlier plan in a tie; at least one plan was built."""
        return min(self.plans, key=lambda plan: plan.seconds)

    def try_arrangements(self, arrangements: Iterable[Arrangement], max_plans: int) -> None:
        """Build the plans of arrangements, at most ``max_plans`` distinct plans."""
        max_plans = min(len(self._plans) + max_plans, _MAX_ARRANGEMENTS)
        batch: dict[tuple[object, ...], Shelving] = {}
        for arrangement in self._untried(arrangements):
            if self._is_enough or len(self._plans) + len(batch) >= max_plans:
                break
            stop_if(self._should_stop)
            self._tried.add(arrangement)
            shelving = self._shelver(arrangement)
            if shelving.key not in self._plans:
                batch[shelving.key] = shelving
            if len(batch) == self._batch_size:
                self._build(batch)
                batch = {}
        self._build(batch)

    def complete(self) -> None:
        """Vary the best arrangement, one parameter at a time, while that helps; then level the best plans."""
        if self._is_complete:
            return
        self._is_complete = True
        while len(self._plans) < _MAX_ARRANGEMENTS and not self._is_enough:
            best = self.best.shelving.arrangement
            more = () if self._step.problem.cluster.has_equal_speeds else (replace(best, pools=None),)
            untried = self._untried([*more, *variations(best)])
            if not untried:
                break
            self.try_arrangements(untried, _MAX_ARRANGEMENTS)
        if not self._is_enough and self._step.num_ranks > 1:
            self._level()

    @property
    def _is_enough(self) -> bool:
        """Whether the best plan is good or the work budget is used up."""
        if not self._plans:
            return False
        used = sum(plan.array_entries for plan in self.plans)
        return self.best.seconds <= _GOOD * self._bound or used >= MAX_ARRAY_ENTRIES

    def _untried(self, arrangements: Iterable[Arrangement]) -> list[Arrangement]:
        """Return the distinct arrangements that were not tried yet."""
        distinct = dict.fromkeys(arrangement.for_ranks(self._step.num_ranks) for arrangement in arrangements)
        return [arrangement for arrangement in distinct if arrangement not in self._tried]

    def _build(self, batch: dict[tuple[object, ...], Shelving]) -> None:
        """Build a batch, and add its plans one by one until there are enough, as if they were built one by one."""
        plans = build_plans(self._step, list(batch.values())) if batch else []
        for key, plan in zip(batch, plans, strict=True):
            if self._is_enough:
                break
            self._plans[key] = plan

    def _level(self) -> None:
        """Level the fastest plans."""
        stop_if(self._should_stop)
        count = min(max(1, _LEVELED_RANKS // self._step.num_ranks), _MAX_LEVELED)
        keys = sorted(self._plans, key=lambda key: self._plans[key].seconds)[:count]
        self._plans.update(zip(keys, level_plans(self._step, [self._plans[key] for key in keys]), strict=True))
