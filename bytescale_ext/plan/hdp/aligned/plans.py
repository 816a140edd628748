"""Build, time and level the plans of arrangements. Leveling moves short sequences to ranks that end early."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from bytescale_ext.plan.hdp.aligned.build import ShelvedRings, place_shorts, sequence_seconds, shelve
from bytescale_ext.plan.hdp.aligned.clock import SequenceSeconds, SlotSeconds, run_pipelines
from bytescale_ext.plan.hdp.aligned.shelving import Shelving
from bytescale_ext.plan.hdp.aligned.step import AlignedStep
from bytescale_ext.plan.step.placed import PlacedRanks

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

MAX_ARRAY_ENTRIES: Final = 30_000_000
"""Array entries that a search may touch, which bounds its time. A plan that touches more is not timed at all."""


@dataclass(frozen=True, slots=True)
class Dealing:
    """How short sequences are dealt to ranks.

    Attributes:
        rounds: number of rounds; each round after the first corrects the loads by the measured finishes.
        correction: share of the difference between finish and load that a round corrects.
    """

    rounds: int
    correction: float


FIRST_DEAL: Final = Dealing(2, 1.0)
LEVELING: Final = Dealing(5, 0.5)
"""Continues after ``FIRST_DEAL``. Short sequences are few, so a full correction would make ranks change places."""


@dataclass(frozen=True, eq=False)
class ArrangementPlan:
    """The plan of a arrangement.

    Attributes:
        shelving: the arrangement with its rings on shelves.
        placed: placement of all sequences.
        seconds: time at which the last rank ends; inf if the plan is too large to be timed.
        loads: seconds of each rank without its short sequences: [num_ranks].
        array_entries: estimated array entries that building and timing the plan touches.
    """

    shelving: Shelving
    placed: PlacedRanks
    seconds: float
    loads: Floats
    array_entries: int


def build_plans(step: AlignedStep, shelvings: Sequence[Shelving]) -> list[ArrangementPlan]:
    """Return the plan of each arrangement."""
    shelved = shelve(step, shelvings)
    return _deal(step, shelvings, shelved, shelved.estimates, FIRST_DEAL)


def level_plans(step: AlignedStep, plans: Sequence[ArrangementPlan]) -> list[ArrangementPlan]:
    """Deal the short sequences of each plan again. No returned plan is slower than before."""
    shelvings = [plan.shelving for plan in plans]
    loads = np.concatenate([plan.loads for plan in plans])
    leveled = _deal(step, shelvings, shelve(step, shelvings), loads, LEVELING)
    return [min(pair, key=lambda plan: plan.seconds) for pair in zip(plans, leveled, strict=True)]


def _deal(
    step: AlignedStep, shelvings: Sequence[Shelving], shelved: ShelvedRings, loads: Floats, dealing: Dealing
) -> list[ArrangementPlan]:
    """Return the fastest plan of each arrangement.

    ``loads``: estimated seconds of each rank of all arrangements without its short sequences: [ranks].
    """
    seconds = sequence_seconds(step, shelved)
    rounds = []
    for _ in range(dealing.rounds):
        placed, short_seconds = place_shorts(step, shelved, loads)
        finishes = _finishes(step, placed, seconds)
        loads = loads + dealing.correction * (finishes - short_seconds - loads)
        parts = (np.split(values, len(shelvings)) for values in (finishes, loads))
        columns = enumerate(zip(shelvings, *parts, strict=True))
        rounds.append([_plan(step, placed, number, *column) for number, column in columns])
        if np.isinf(finishes).any() or step.num_ranks == 1:  # another round would not change the plan
            break
    return [min(plans, key=lambda plan: plan.seconds) for plans in zip(*rounds, strict=True)]


def _finishes(step: AlignedStep, placed: PlacedRanks, seconds: SequenceSeconds) -> Floats:
    """Return the time at which each rank of all plans ends, in seconds: [ranks]; inf if they are too large to time."""
    if step.array_entries(placed) > MAX_ARRAY_ENTRIES:
        return np.full(placed.num_ranks, np.inf)
    speeds = step.problem.cluster.unequal_speeds()
    if speeds is not None:
        speeds = np.tile(speeds, placed.num_ranks // step.num_ranks)
    return run_pipelines(SlotSeconds.of(placed, seconds, step.problem.slicing, speeds), step.num_stages)


def _plan(
    step: AlignedStep, placed: PlacedRanks, number: int, shelving: Shelving, finishes: Floats, loads: Floats
) -> ArrangementPlan:
    """Return the plan of arrangement ``number`` from the joint placement of all arrangements.

    ``finishes``, ``loads``: end and load of each of its ranks, in seconds: [num_ranks].
    """
    begin, stop = number * len(step.lengths), (number + 1) * len(step.lengths)
    firsts = placed.first_ranks[begin:stop] - number * step.num_ranks
    widths, orders = placed.widths[begin:stop], placed.orders[begin:stop]
    own = PlacedRanks(step.num_ranks, step.lengths, firsts, widths, orders, aligned=True)
    return ArrangementPlan(shelving, own, float(finishes.max()), loads, step.array_entries(own))
