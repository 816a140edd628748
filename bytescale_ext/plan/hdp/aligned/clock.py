"""The time of an aligned plan with pipelines: the planner's fast clock, one array operation for all ranks.

Every stage runs the slots in the order of 1F1B (PipeDream-Flush, Narayanan et al. 2021), with slices in that of Seq1F1B
(Sun et al. 2024), and in aligned slots that order is the same for all pipelines; one with fewer slots skips the later
ones. So an action (forward or backward of slice j of slot m on stage q) is computed for all ranks at once. Slices
are numbered slot by slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bytescale_ext.plan.cost.cost_model import StageCost
from bytescale_ext.plan.cost.slice_shares import SliceShares
from bytescale_ext.plan.schedule.actions import FORWARD, stage_orders
from bytescale_ext.plan.step.placed import PlacedRanks
from bytescale_ext.plan.step.sizes import Slicing
from bytescale_ext.plan.step.table import owned

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class SequenceSeconds:
    """Seconds of the slices of placed sequences on each of their ranks, forward and backward.

    Attributes:
        launch: of a slice without any tokens: [2].
        alone: of each slice of a sequence on one rank, 0 of the others: [2, n].
        rings: the sequences on several ranks: [rings].
        ring_slices: of the slices of each of these, without launches: [2, rings, k].
    """

    launch: Floats
    alone: Floats
    rings: Ints
    ring_slices: Floats

    @classmethod
    def of(cls, placed: PlacedRanks, stage: StageCost, slicing: Slicing) -> SequenceSeconds:
        """Return the seconds of a placement in slices."""
        rings = np.flatnonzero(placed.widths > 1)
        alone = alone_seconds(placed.lengths, stage, slicing)
        alone[:, rings] = 0.0
        slices = ring_seconds(placed.lengths[rings], placed.widths[rings], stage, slicing)
        return cls(launch_seconds(stage), alone, rings, slices)


def launch_seconds(stage: StageCost) -> Floats:
    """Return the seconds of a slice without any tokens, forward and backward: [2]."""
    return np.array([stage.forward.g, stage.backward.g])


def alone_seconds(lengths: Ints, stage: StageCost, slicing: Slicing) -> Floats:
    """Return the seconds of each slice of sequences on one rank, without launches: [2, n].

    All slices of a sequence take equally long. ``lengths``: tokens of each: [n].
    """
    sizes = lengths.astype(np.float64)
    both = [one.a * one.squares(sizes) + one.b * sizes for one in (stage.forward, stage.backward)]
    return np.array(both) / slicing.num_slices


def ring_seconds(lengths: Ints, widths: Ints, stage: StageCost, slicing: Slicing) -> Floats:
    """Return the seconds of the slices of rings on each of their ranks, without launches: [2, rings, k].

    ``lengths``, ``widths``: tokens and ranks of each: [rings].
    """
    cut = SliceShares.of(stage.both, lengths.astype(np.float64), widths.astype(np.float64), slicing)
    (forward, _), (backward, _) = cut.stage_costs(stage)
    return np.array((forward, backward))


@dataclass(frozen=True, eq=False)
class SlotSeconds:
    """The costs of an aligned plan.

    Attributes:
        slicing: how each slot is sliced; k is its number of slices.
        seconds: of each slice on each rank, forward and backward, as slow as its slowest partner:
            [2, slots x k, ranks].
        absent: the slot is after the rank's last one: [slots, ranks].
        opens: the rank is the first of its coupled group in the slot: [slots, ranks].
    """

    slicing: Slicing
    seconds: Floats
    absent: Bools
    opens: Bools

    @classmethod
    def of(cls, placed: PlacedRanks, costs: SequenceSeconds, slicing: Slicing) -> SlotSeconds:
        """Return the costs of an aligned plan of at least one sequence; ``costs``: of its sequences.

        All rings of a slot on a rank have the same ranks, and take equally long on each. So the slowest of these is the
        one whose other sequences take longest.
        """
        num_slots, num_ranks, num_slices = int(placed.orders.max()) + 1, placed.num_ranks, slicing.num_slices
        num_cells = num_slots * num_ranks
        cells = placed.orders * num_ranks + placed.first_ranks
        shards, members = owned(placed.widths[costs.rings])
        of_rings = cells[costs.rings][shards] + members
        opens, used = np.ones(num_cells, dtype=np.bool_), np.zeros(num_cells, dtype=np.bool_)
        opens[of_rings[members > 0]] = False
        used[cells] = used[of_rings] = True
        absent = ~np.logical_or.accumulate(used.reshape(num_slots, num_ranks)[::-1])[::-1]
        ways = np.array([[0], [num_cells]])
        local = np.bincount((cells + ways).ravel(), costs.alone.ravel(), 2 * num_cells).reshape(2, num_cells)
        slowest = np.maximum.reduceat(local, np.flatnonzero(opens), axis=1)[:, np.cumsum(opens) - 1]
        whole = (slowest + costs.launch[:, None]).reshape(2, num_slots, 1, num_ranks)
        seconds = np.repeat(np.where(absent[:, None], 0.0, whole), num_slices, axis=2)
        slots, ranks = np.divmod(of_rings, num_ranks)
        for way, slices in zip(seconds, costs.ring_slices, strict=True):
            np.add.at(way.swapaxes(1, 2), (slots, ranks), slices[shards])
        units = num_slots * num_slices
        return cls(slicing, seconds.reshape(2, units, num_ranks), absent, opens.reshape(num_slots, num_ranks))


def slot_seconds(placed: PlacedRanks, stage: StageCost, slicing: Slicing) -> SlotSeconds:
    """Return the costs of an aligned plan of at least one sequence on stages of equal cost."""
    return SlotSeconds.of(placed, SequenceSeconds.of(placed, stage, slicing), slicing)


def run_pipelines(slots: SlotSeconds, num_stages: int) -> Floats:
    """Return when the last backward of each rank ends: [num_ranks]."""
    num_slots, num_ranks = slots.absent.shape
    waves, num_rows = _waves_in_rows(num_stages, num_slots, slots.slicing.order_of_work())
    seconds, has_absent = slots.seconds, bool(slots.absent.any())
    if has_absent:  # a slot that a rank leaves out ends before everything, so it delays nothing
        seconds = np.where(np.repeat(slots.absent, slots.slicing.num_slices, axis=0), -np.inf, seconds)
    seconds = seconds.reshape(-1, num_ranks)
    stops = np.zeros((num_rows, num_ranks))  # of actions
    free = np.zeros_like(stops) if has_absent else stops  # from when on their stages are
    groups = _Groups(slots.opens)
    for wave in waves:
        before = free.take(wave.earlier, axis=0)
        starts = groups.latest(np.maximum(before, stops.take(wave.inputs, axis=0)), wave.slots)
        np.add(starts, seconds.take(wave.costs, axis=0), out=stops[wave.rows])
        if has_absent:
            np.maximum(before, stops[wave.rows], out=free[wave.rows])
    return np.asarray(free[waves[-1].rows].max(axis=0))


class _Groups:
    """The coupled groups of the ranks in each slot, worked out once for all slices of a slot."""

    def __init__(self, opens: Bools) -> None:
        self._opens, self._alone = opens, opens.all(axis=1).tolist()
        self._known: dict[tuple[int, ...], tuple[Ints, Ints] | None] = {}

    def latest(self, starts: Floats, slots: tuple[int, ...]) -> Floats:
        """Return the latest start of each rank's group: [actions, ranks], as ``starts``.

        ``slots``: the slot of each action.
        """
        if slots not in self._known:
            self._known[slots] = self._found(slots)
        known = self._known[slots]
        return starts if known is None else np.maximum.reduceat(starts.ravel(), known[0]).take(known[1])

    def _found(self, slots: tuple[int, ...]) -> tuple[Ints, Ints] | None:
        """Return where each group begins, and the group of each rank, [actions, ranks]; None: all ranks are alone."""
        if all(self._alone[slot] for slot in slots):
            return None
        opens = self._opens[list(slots)]
        return opens.ravel().nonzero()[0], (opens.cumsum() - 1).reshape(opens.shape)


def action_waves(num_stages: int, num_slots: int, slicing: Slicing) -> tuple[tuple[Ints, Ints, Ints], ...]:
    """Return all actions in waves; the actions of a wave do not depend on each other.

    Each wave is (FORWARD or BACKWARD, slice, stage) of its actions: [actions of the wave] each.
    """
    orders = stage_orders(num_stages, num_slots, slicing)
    lanes = [list(zip(*order.T[:2].tolist(), strict=True)) for order in orders]
    heads = [0] * num_stages
    passed = [0] * (num_slots * slicing.num_slices)  # stages that a slice has passed, down and up again
    waves = []
    while any(head < len(lane) for head, lane in zip(heads, lanes, strict=True)):
        wave = []
        for stage, lane in enumerate(lanes):
            kind, unit = lane[heads[stage]] if heads[stage] < len(lane) else (FORWARD, -1)
            if unit >= 0 and passed[unit] == (2 * num_stages - 1 - stage if kind else stage):
                wave.append((kind, unit, stage))
        for _, unit, stage in wave:
            passed[unit] += 1
            heads[stage] += 1
        waves.append(wave)
    columns = [np.array(wave, dtype=np.int64).T for wave in waves]
    return tuple((kinds, units, stages) for kinds, units, stages in columns)


class _Wave(NamedTuple):
    """A wave on the clock, which keeps the stop of an action in a row until no later action needs it.

    Attributes:
        rows: of its actions.
        inputs: the row of what each action waits for, on another stage: [actions].
        earlier: the row of the action before each on its stage: [actions].
        costs: the row of the seconds of each: [actions].
        slots: the slot of each.
    """

    rows: slice
    inputs: Ints
    earlier: Ints
    costs: Ints
    slots: tuple[int, ...]


@lru_cache(maxsize=128)
def _waves_in_rows(num_stages: int, num_slots: int, slicing: Slicing) -> tuple[tuple[_Wave, ...], int]:
    """Return the waves, and how many rows they use; the last row stays 0, for actions that wait for nothing."""
    waves, num_units = action_waves(num_stages, num_slots, slicing), num_slots * slicing.num_slices
    kinds, units, stages = (np.concatenate(column) for column in zip(*waves, strict=True))
    counts = [len(each) for each, *_ in waves]
    numbers, places = owned(np.array(counts))
    actions = numbers * num_stages + places
    inputs, earlier = _previous(units, actions), _previous(stages, actions)
    oldest = np.minimum(np.where(inputs < 0, actions, inputs), np.where(earlier < 0, actions, earlier))
    num_rows = num_stages * (int((numbers - oldest // num_stages).max()) + 1)
    inputs, earlier = (np.where(each < 0, num_rows, each % num_rows) for each in (inputs, earlier))
    rows, costs, slots = (
        (actions % num_rows).tolist(),
        kinds * num_units + units,
        (units // slicing.num_slices).tolist(),
    )
    found = []
    for count, stop in zip(counts, accumulate(counts), strict=True):
        own = slice(stop - count, stop)
        first = rows[own.start]
        found.append(_Wave(slice(first, first + count), inputs[own], earlier[own], costs[own], tuple(slots[own])))
    return tuple(found), num_rows + 1


def _previous(owners: Ints, actions: Ints) -> Ints:
    """Return the action of the same owner before each, or -1: [actions], as the arguments, in running order."""
    in_order = np.argsort(owners, kind="stable")
    follows = owners[in_order[1:]] == owners[in_order[:-1]]
    found = np.full(len(owners), -1)
    found[in_order[1:][follows]] = actions[in_order[:-1][follows]]
    return found
