"""The balance planner for aligned slots: pipelines, virtual stages, expert parallelism.

The time of a pipeline is more than the sum of its slots: fill and drain cost time too, and a tall slot costs
``num_stages - 1`` times its height again where its neighbours are lower. So rings are as wide as their exchange allows,
shelves of one height span many ranks (``shelves``), shelves rise to the tallest and fall after it, the first and last
slots hold few short sequences, and ranks with tall slots get less work in total. How much of each is best depends on
the lengths: a few dozen layouts are built (``build``) and timed (``clock``), and the fastest is taken.

Slices (Seq1F1B) make fill and drain k times shorter, so a tall slot costs less; but where keys are not kept, each
slice exchanges the keys of all tokens before it, so rings are narrower.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from bytescale_ext.plan.hdp.aligned.build import shelve, with_shorts
from bytescale_ext.plan.hdp.aligned.clock import run_pipelines, slot_seconds
from bytescale_ext.plan.hdp.aligned.layouts import SLICED_STARTS, STARTS, Layout, variations
from bytescale_ext.plan.hdp.aligned.step import AlignedStep
from bytescale_ext.plan.hdp.deadline import ShouldStop, stop_if
from bytescale_ext.plan.hdp.problem import Problem
from bytescale_ext.plan.step.placed import PlacedRanks

Floats = npt.NDArray[np.float64]

_MOST_WORK = 30_000_000  # array entries that the search may touch: this bounds its time
_MOST_LAYOUTS = 32
_ROUNDS = 2  # times that the short sequences of a layout are dealt
_GOOD = 1.01  # a plan this near to the lower bound ends the search


def place_pipelined(problem: Problem, should_stop: ShouldStop = None) -> PlacedRanks:
    """Place a step in aligned slots for the shortest time of all pipelines."""
    lengths = problem.lengths
    if not len(lengths):
        return PlacedRanks(problem.num_ranks, lengths, lengths, lengths, lengths, aligned=True)
    ordered, in_order = problem.longest_first()
    placed = _best_layout(AlignedStep(ordered), should_stop)
    back = np.argsort(in_order, kind="stable")
    return replace(
        placed,
        lengths=lengths,
        first_ranks=placed.first_ranks[back],
        widths=placed.widths[back],
        orders=placed.orders[back],
    )


def _best_layout(step: AlignedStep, should_stop: ShouldStop) -> PlacedRanks:
    """Take the best of some layouts, then change one attribute at a time and keep each improvement."""
    bound = max(step.problem.mean_seconds(), (1 + step.fill) * step.problem.longest_seconds())
    tries = list(STARTS if step.problem.slicing.num_slices == 1 else SLICED_STARTS)
    best = _timed(step, tries[0])
    work = step.size(best.placed)
    seen = {best.layout}
    while tries:
        for layout in tries:
            if layout in seen:
                continue
            if len(seen) >= _MOST_LAYOUTS or work >= _MOST_WORK or best.seconds <= _GOOD * bound:
                return best.placed
            stop_if(should_stop)
            seen.add(layout)
            timed = _timed(step, layout)
            work += step.size(timed.placed)
            best = min(best, timed, key=lambda timed: timed.seconds)
        tries = [layout for layout in variations(best.layout) if layout not in seen]
    return best.placed


@dataclass(frozen=True, eq=False)
class _Timed:
    layout: Layout
    placed: PlacedRanks
    seconds: float


def _timed(step: AlignedStep, layout: Layout) -> _Timed:
    """Build and time the plan of a layout, then build it again with short sequences moved to ranks that end early."""
    shelved = shelve(step, layout)
    estimate = shelved.loads + layout.peak * step.fill * np.maximum(shelved.tallest, shelved.pack_seconds)
    best: _Timed | None = None
    for _ in range(_ROUNDS):
        placed, short_seconds = with_shorts(step, layout, shelved, estimate)
        if step.size(placed) > _MOST_WORK:  # too large for any search
            return _Timed(layout, placed, np.inf)
        finish = run_pipelines(slot_seconds(placed, step.problem.stage, step.problem.slicing), step.num_stages)
        timed = _Timed(layout, placed, float(finish.max()))
        best = timed if best is None or timed.seconds < best.seconds else best
        estimate = finish - short_seconds
    assert best is not None
    return best
