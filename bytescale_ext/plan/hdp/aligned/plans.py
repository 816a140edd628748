"""Build and time the plans of layouts, and level them: move short sequences to ranks that end early."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from bytescale_ext.plan.hdp.aligned.build import ShelvedRings, sequence_seconds, shelve, with_shorts
from bytescale_ext.plan.hdp.aligned.clock import SequenceSeconds, SlotSeconds, run_pipelines
from bytescale_ext.plan.hdp.aligned.shelving import Shelving
from bytescale_ext.plan.hdp.aligned.step import AlignedStep
from bytescale_ext.plan.step.placed import PlacedRanks

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

MOST_WORK: Final = 30_000_000
"""Array entries that a search may touch, which bounds its time; a plan that alone touches more is not timed."""


@dataclass(frozen=True, slots=True)
class Dealing:
    """How short sequences are dealt.

    Attributes:
        rounds: how often; from the second time on by when each rank ended before.
        share: of the difference between the ranks that a round takes back.
    """

    rounds: int
    share: float


FIRST: Final = Dealing(2, 1.0)
AGAIN: Final = Dealing(5, 0.5)
"""Goes on where ``FIRST`` ended. Half the difference: short sequences are few, so ranks would change places."""


@dataclass(frozen=True, eq=False)
class LayoutPlan:
    """The plan of a layout.

    Attributes:
        shelving: what it was made from.
        placed: where each sequence is.
        seconds: when the last rank ends; inf where it is too large to be timed.
        loads: seconds that each rank takes besides its short sequences: [num_ranks].
        size: array entries that building and timing it touches.
    """

    shelving: Shelving
    placed: PlacedRanks
    seconds: float
    loads: Floats
    size: int


def built_plans(step: AlignedStep, shelvings: Sequence[Shelving]) -> list[LayoutPlan]:
    """Return the plans of layouts."""
    shelved = shelve(step, shelvings)
    return _dealt(step, shelvings, shelved, shelved.estimates, FIRST)


def leveled_plans(step: AlignedStep, plans: Sequence[LayoutPlan]) -> list[LayoutPlan]:
    """Return plans with their short sequences dealt again some more times, none of them slower than before."""
    shelvings = [plan.shelving for plan in plans]
    found = _dealt(step, shelvings, shelve(step, shelvings), np.concatenate([plan.loads for plan in plans]), AGAIN)
    return [min(pair, key=lambda plan: plan.seconds) for pair in zip(plans, found, strict=True)]


def _dealt(
    step: AlignedStep, shelvings: Sequence[Shelving], shelved: ShelvedRings, loads: Floats, dealing: Dealing
) -> list[LayoutPlan]:
    """Return the fastest plan of each layout. ``loads``: what the ranks of all layouts take at first: [ranks]."""
    seconds = sequence_seconds(step, shelved)
    rounds = []
    for _ in range(dealing.rounds):
        placed, short_seconds = with_shorts(step, shelved, loads)
        finishes = _finishes(step, placed, seconds)
        loads = loads + dealing.share * (finishes - short_seconds - loads)
        of_ranks = (np.split(each, len(shelvings)) for each in (finishes, loads))
        of_layouts = enumerate(zip(shelvings, *of_ranks, strict=True))
        rounds.append([_plan(step, placed, number, *one) for number, one in of_layouts])
        if np.isinf(finishes).any() or step.num_ranks == 1:  # dealing again tells nothing
            break
    return [min(plans, key=lambda plan: plan.seconds) for plans in zip(*rounds, strict=True)]


def _finishes(step: AlignedStep, placed: PlacedRanks, seconds: SequenceSeconds) -> Floats:
    """Return when each rank of plans ends, [ranks]; inf where a plan is too large for any search."""
    if step.size(placed) > MOST_WORK:
        return np.full(placed.num_ranks, np.inf)
    return run_pipelines(SlotSeconds.of(placed, seconds, step.problem.slicing), step.num_stages)


def _plan(
    step: AlignedStep, placed: PlacedRanks, number: int, shelving: Shelving, finishes: Floats, loads: Floats
) -> LayoutPlan:
    """Return the plan of one layout of those side by side. ``finishes``, ``loads``: of its ranks: [num_ranks]."""
    begin, stop = number * len(step.lengths), (number + 1) * len(step.lengths)
    firsts = placed.first_ranks[begin:stop] - number * step.num_ranks
    widths, orders = placed.widths[begin:stop], placed.orders[begin:stop]
    alone = PlacedRanks(step.num_ranks, step.lengths, firsts, widths, orders, aligned=True)
    return LayoutPlan(shelving, alone, float(finishes.max()), loads, step.size(alone))
