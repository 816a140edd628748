"""The planner's fast clock: the time of an aligned plan on all pipelines, with one array operation per wave of actions.

Every stage runs the slots in the order of 1F1B (PipeDream-Flush, Narayanan et al. 2021), or in the order of Seq1F1B
(Sun et al. 2024) with slices. In aligned slots this order is the same for all pipelines; a pipeline with fewer slots
skips the later slots. So an action (forward or backward of slice j of slot m on stage q) is computed for all ranks at
once. Slices are numbered slot by slot.
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
from bytescale_ext.plan.step.table import ragged_indices

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class SequenceSeconds:
    """Seconds of the slices of placed sequences on each of their ranks; the first axis is forward and backward.

    Attributes:
        overheads: seconds of an empty slice: [2].
        local: seconds of each slice of each sequence, 0 for rings: [2, n].
        rings: indices of the sequences on several ranks: [rings].
        ring_slices: seconds of each slice of these sequences, without overheads: [2, rings, k].
    """

    overheads: Floats
    local: Floats
    rings: Ints
    ring_slices: Floats

    @classmethod
    def of(cls, placed: PlacedRanks, stage: StageCost, slicing: Slicing) -> SequenceSeconds:
        """Return the seconds of the sequences of a placement."""
        rings = np.flatnonzero(placed.widths > 1)
        local = local_seconds(placed.lengths, stage, slicing)
        local[:, rings] = 0.0
        slices = ring_seconds(placed.lengths[rings], placed.widths[rings], stage, slicing)
        return cls(slice_overheads(stage), local, rings, slices)


def slice_overheads(stage: StageCost) -> Floats:
    """Return the seconds of an empty slice, forward and backward: [2]."""
    return np.array([stage.forward.g, stage.backward.g])


def local_seconds(lengths: Ints, stage: StageCost, slicing: Slicing) -> Floats:
    """Return the seconds of a slice of each sequence on one rank, forward and backward, without overheads: [2, n].

    All slices of a sequence take equally long. ``lengths``: tokens of each sequence: [n].
    """
    sizes = lengths.astype(np.float64)
    whole = [cost.a * cost.squares(sizes) + cost.b * sizes for cost in (stage.forward, stage.backward)]
    return np.array(whole) / slicing.num_slices


def ring_seconds(lengths: Ints, widths: Ints, stage: StageCost, slicing: Slicing) -> Floats:
    """Return the seconds of each slice of rings on each of their ranks, without overheads: [2, rings, k].

    The first axis is forward and backward. ``lengths``, ``widths``: tokens and ranks of each ring: [rings].
    """
    shares = SliceShares.of(stage.both, lengths.astype(np.float64), widths.astype(np.float64), slicing)
    (forward, _), (backward, _) = shares.stage_costs(stage)
    return np.array((forward, backward))


@dataclass(frozen=True, eq=False)
class SlotSeconds:
    """Seconds of the slots of an aligned plan.

    Attributes:
        slicing: slicing of each slot into k slices.
        seconds: seconds of each slice on each rank, forward and backward; all ranks of a coupled group take as long as
            the slowest of them: [2, slots x k, ranks].
        absent: whether the slot comes after the rank's last slot: [slots, ranks].
        opens: whether the rank is the first of its coupled group in the slot: [slots, ranks].
    """

    slicing: Slicing
    seconds: Floats
    absent: Bools
    opens: Bools

    @classmethod
    def of(
        cls, placed: PlacedRanks, costs: SequenceSeconds, slicing: Slicing, speeds: Floats | None = None
    ) -> SlotSeconds:
        """Return the seconds of an aligned plan of at least one sequence.

        All rings of a slot on a rank have the same ranks and take equally long on each of them. So the slowest of these
        ranks is the rank with the most work in local sequences. On ranks of unlike speeds all of them take as long as
        their slowest rank.

        Args:
            placed: placement of the sequences.
            costs: seconds of the sequences.
            slicing: slicing of the micro-batches.
            speeds: speed of each rank, [num_ranks]; None: all are 1.
        """
        num_slots, num_ranks, num_slices = int(placed.orders.max()) + 1, placed.num_ranks, slicing.num_slices
        num_cells = num_slots * num_ranks
        cells = placed.orders * num_ranks + placed.first_ranks
        shards, members = ragged_indices(placed.widths[costs.rings])
        of_rings = cells[costs.rings][shards] + members
        opens, used = np.ones(num_cells, dtype=np.bool_), np.zeros(num_cells, dtype=np.bool_)
        opens[of_rings[members > 0]] = False
        used[cells] = used[of_rings] = True
        absent = ~np.logical_or.accumulate(used.reshape(num_slots, num_ranks)[::-1])[::-1]
        ways = np.array([[0], [num_cells]])
        local = np.bincount((cells + ways).ravel(), costs.local.ravel(), 2 * num_cells).reshape(2, num_cells)
        slowest = np.maximum.reduceat(local, np.flatnonzero(opens), axis=1)[:, np.cumsum(opens) - 1]
        whole = (slowest + costs.overheads[:, None]).reshape(2, num_slots, 1, num_ranks)
        seconds = np.repeat(np.where(absent[:, None], 0.0, whole), num_slices, axis=2)
        slots, ranks = np.divmod(of_rings, num_ranks)
        for way, slices in zip(seconds, costs.ring_slices, strict=True):
            np.add.at(way.swapaxes(1, 2), (slots, ranks), slices[shards])
        units = num_slots * num_slices
        if speeds is not None:  # members of a ring are neighbours, so a group is a range of cells
            cell_speeds = np.tile(speeds, num_slots)
            slowest_speeds = np.minimum.reduceat(cell_speeds, np.flatnonzero(opens))[np.cumsum(opens) - 1]
            seconds = seconds / slowest_speeds.reshape(num_slots, 1, num_ranks)
        return cls(slicing, seconds.reshape(2, units, num_ranks), absent, opens.reshape(num_slots, num_ranks))


def slot_seconds(placed: PlacedRanks, stage: StageCost, slicing: Slicing) -> SlotSeconds:
    """Return the seconds of the slots of an aligned plan of at least one sequence, on stages of equal cost."""
    return SlotSeconds.of(placed, SequenceSeconds.of(placed, stage, slicing), slicing)


def run_pipelines(slots: SlotSeconds, num_stages: int) -> Floats:
    """Return the time at which each rank ends its last backward pass, in seconds: [num_ranks]."""
    num_slots, num_ranks = slots.absent.shape
    waves, num_rows = _waves_in_rows(num_stages, num_slots, slots.slicing.order_of_work())
    seconds, has_absent = slots.seconds, bool(slots.absent.any())
    if has_absent:  # a slot that a rank skips ends at -inf, so it delays nothing
        seconds = np.where(np.repeat(slots.absent, slots.slicing.num_slices, axis=0), -np.inf, seconds)
    seconds = seconds.reshape(-1, num_ranks)
    stops = np.zeros((num_rows, num_ranks))  # of actions
    free = np.zeros_like(stops) if has_absent else stops  # times at which the stages of the actions are free
    groups = _CoupledGroups(slots.opens)
    for wave in waves:
        before = free.take(wave.earlier, axis=0)
        starts = groups.latest(np.maximum(before, stops.take(wave.inputs, axis=0)), wave.slots)
        np.add(starts, seconds.take(wave.costs, axis=0), out=stops[wave.rows])
        if has_absent:
            np.maximum(before, stops[wave.rows], out=free[wave.rows])
    return np.asarray(free[waves[-1].rows].max(axis=0))


class _CoupledGroups:
    """The coupled groups of the ranks in each slot. The groups of a wave are computed once and kept."""

    def __init__(self, opens: Bools) -> None:
        self._opens, self._is_uncoupled = opens, opens.all(axis=1).tolist()
        self._cache: dict[tuple[int, ...], tuple[Ints, Ints] | None] = {}

    def latest(self, starts: Floats, slots: tuple[int, ...]) -> Floats:
        """Return the latest start in each rank's group: [actions, ranks], as ``starts``.

        ``slots``: the slot of each action.
        """
        if slots not in self._cache:
            self._cache[slots] = self._groups(slots)
        groups = self._cache[slots]
        return starts if groups is None else np.maximum.reduceat(starts.ravel(), groups[0]).take(groups[1])

    def _groups(self, slots: tuple[int, ...]) -> tuple[Ints, Ints] | None:
        """Return the first cell of each group, and the group of each rank, [actions, ranks]; None without groups."""
        if all(self._is_uncoupled[slot] for slot in slots):
            return None
        opens = self._opens[list(slots)]
        return opens.ravel().nonzero()[0], (opens.cumsum() - 1).reshape(opens.shape)


def action_waves(num_stages: int, num_slots: int, slicing: Slicing) -> tuple[tuple[Ints, Ints, Ints], ...]:
    """Return all actions in waves. The actions of a wave do not depend on each other.

    A wave is three columns, (FORWARD or BACKWARD, slice, stage) of its actions: [actions of the wave] each.
    """
    orders = stage_orders(num_stages, num_slots, slicing)
    queues = [list(zip(*order.T[:2].tolist(), strict=True)) for order in orders]
    heads = [0] * num_stages
    num_passed = [0] * (num_slots * slicing.num_slices)  # stages that each slice has passed, down and up again
    waves = []
    while any(head < len(queue) for head, queue in zip(heads, queues, strict=True)):
        wave = []
        for stage, queue in enumerate(queues):
            kind, unit = queue[heads[stage]] if heads[stage] < len(queue) else (FORWARD, -1)
            if unit >= 0 and num_passed[unit] == (2 * num_stages - 1 - stage if kind else stage):
                wave.append((kind, unit, stage))
        for _, unit, stage in wave:
            num_passed[unit] += 1
            heads[stage] += 1
        waves.append(wave)
    columns = [np.array(wave, dtype=np.int64).T for wave in waves]
    return tuple((kinds, units, stages) for kinds, units, stages in columns)


class _Wave(NamedTuple):
    """A wave of actions. The clock stores the stop of an action in a row until no later action needs it.

    Attributes:
        rows: rows of the wave's actions.
        inputs: row of the action on another stage that each action waits for: [actions].
        earlier: row of the action before each action on its own stage: [actions].
        costs: row of the seconds of each action: [actions].
        slots: slot of each action.
    """

    rows: slice
    inputs: Ints
    earlier: Ints
    costs: Ints
    slots: tuple[int, ...]


@lru_cache(maxsize=128)
def _waves_in_rows(num_stages: int, num_slots: int, slicing: Slicing) -> tuple[tuple[_Wave, ...], int]:
    """Return the waves and the number of rows that they use. The last row stays 0: the input of the first actions."""
    waves, num_units = action_waves(num_stages, num_slots, slicing), num_slots * slicing.num_slices
    kinds, units, stages = (np.concatenate(column) for column in zip(*waves, strict=True))
    counts = [len(wave_kinds) for wave_kinds, *_ in waves]
    numbers, places = ragged_indices(np.array(counts))
    actions = numbers * num_stages + places
    inputs, earlier = _previous(units, actions), _previous(stages, actions)
    oldest = np.minimum(np.where(inputs < 0, actions, inputs), np.where(earlier < 0, actions, earlier))
    num_rows = num_stages * (int((numbers - oldest // num_stages).max()) + 1)
    inputs, earlier = (np.where(row < 0, num_rows, row % num_rows) for row in (inputs, earlier))
    rows, costs, slots = (
        (actions % num_rows).tolist(),
        kinds * num_units + units,
        (units // slicing.num_slices).tolist(),
    )
    waves_in_rows = []
    for count, stop in zip(counts, accumulate(counts), strict=True):
        part = slice(stop - count, stop)
        first = rows[part.start]
        own_rows = slice(first, first + count)
        waves_in_rows.append(_Wave(own_rows, inputs[part], earlier[part], costs[part], tuple(slots[part])))
    return tuple(waves_in_rows), num_rows + 1


def _previous(owners: Ints, actions: Ints) -> Ints:
    """Return the action before each action of the same owner, or -1: [actions], as the arguments, in running order."""
    by_owner = np.argsort(owners, kind="stable")
    follows = owners[by_owner[1:]] == owners[by_owner[:-1]]
    previous = np.full(len(owners), -1)
    previous[by_owner[1:][follows]] = actions[by_owner[:-1][follows]]
    return previous
