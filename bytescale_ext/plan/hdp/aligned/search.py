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

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from bytescale_ext.plan.hdp.aligned.build import shelve, with_shorts
from bytescale_ext.plan.hdp.aligned.clock import SlotSeconds, run_pipelines, slot_seconds
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
_TIMED_RANKS = 256  # about so many ranks of several layouts are timed together, as array operations take long to start
_MOST_TOGETHER = 8  # layouts that are timed together


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
    tries = _unseen(STARTS if step.problem.slicing.num_slices == 1 else SLICED_STARTS, step, set())
    (best,) = _timed(step, tries[:1], None)
    work = step.size(best.placed)
    seen = {best.layout}
    tries = tries[1:]
    together = min(max(_TIMED_RANKS // step.num_ranks, 1), _MOST_TOGETHER)

    def is_over() -> bool:
        return len(seen) >= _MOST_LAYOUTS or work >= _MOST_WORK or best.seconds <= _GOOD * bound

    while tries and not is_over():
        count = min(together, _MOST_LAYOUTS - len(seen))
        batch, tries = tries[:count], tries[count:]
        for timed in _timed(step, batch, should_stop):
            if is_over():
                break
            seen.add(timed.layout)
            work += step.size(timed.placed)
            best = min(best, timed, key=lambda timed: timed.seconds)
        tries = tries or _unseen(variations(best.layout), step, seen)
    return best.placed


def _unseen(layouts: Sequence[Layout], step: AlignedStep, seen: set[Layout]) -> list[Layout]:
    """Return the layouts that make a plan of their own and were not seen."""
    found = dict.fromkeys(layout.on(step.num_ranks) for layout in layouts)
    return [layout for layout in found if layout not in seen]


@dataclass(frozen=True, eq=False)
class _Timed:
    layout: Layout
    placed: PlacedRanks
    seconds: float


def _timed(step: AlignedStep, layouts: Sequence[Layout], should_stop: ShouldStop) -> list[_Timed]:
    """Build and time the plans of layouts, then build them again with short sequences moved to ranks that end early."""
    all_shelved, estimates, found = [], [], []
    for layout in layouts:
        stop_if(should_stop)
        shelved = shelve(step, layout)
        all_shelved.append(shelved)
        estimates.append(shelved.loads + layout.peak * step.fill * np.maximum(shelved.tallest, shelved.pack_seconds))
    for _ in range(_ROUNDS):
        built = [with_shorts(step, *given) for given in zip(layouts, all_shelved, estimates, strict=True)]
        finishes = _finishes(step, [placed for placed, _ in built])
        found.append(
            [
                _Timed(layout, placed, float(finish.max()))
                for layout, (placed, _), finish in zip(layouts, built, finishes, strict=True)
            ]
        )
        too_large = all(np.isinf(one.seconds) for one in found[-1])
        if too_large or step.num_ranks == 1:  # dealing again tells nothing
            break
        estimates = [finish - short_seconds for finish, (_, short_seconds) in zip(finishes, built, strict=True)]
    return [min(rounds, key=lambda timed: timed.seconds) for rounds in zip(*found, strict=True)]


def _finishes(step: AlignedStep, plans: Sequence[PlacedRanks]) -> list[Floats]:
    """Return when each rank of these plans ends, [num_ranks] each; inf where a plan is too large for any search."""
    problem, found = step.problem, [np.full(step.num_ranks, np.inf) for _ in plans]
    timed = [number for number, placed in enumerate(plans) if step.size(placed) <= _MOST_WORK]
    if timed:
        slots = [slot_seconds(plans[number], problem.stage, problem.slicing) for number in timed]
        finish = run_pipelines(SlotSeconds.side_by_side(slots), step.num_stages)
        for number, of_plan in zip(timed, np.split(finish, len(timed)), strict=True):
            found[number] = of_plan
    return found
