"""The time of an aligned plan with pipelines: the planner's fast clock, one array operation for all ranks.

Every stage runs the slots in the order of 1F1B (PipeDream-Flush, Narayanan et al. 2021), with slices in that of Seq1F1B
(Sun et al. 2024), and in aligned slots that order is the same for all pipelines; one with fewer slots skips the later
ones. So an action (forward or backward of slice j of slot m on stage q) is computed for all ranks at once. Slices
are numbered slot by slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from bytescale_ext.plan.cost.cost_model import StageCost
from bytescale_ext.plan.cost.slice_shares import SliceShares
from bytescale_ext.plan.schedule.actions import FORWARD, stage_orders
from bytescale_ext.plan.step.placed import PlacedRanks
from bytescale_ext.plan.step.sizes import Slicing

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class SlotSeconds:
    """The costs of an aligned plan.

    Attributes:
        slicing: how each slot is sliced; k is its number of slices.
        seconds: of each slice on each rank, forward and backward, as slow as its slowest partner:
            [2, slots x k, ranks].
        absent: the slot is after the rank's last one: [slots x k, ranks].
        opens: the rank is the first of its coupled group in the slot: [slots x k, ranks].
    """

    slicing: Slicing
    seconds: Floats
    absent: npt.NDArray[np.bool_]
    opens: npt.NDArray[np.bool_]

    @classmethod
    def side_by_side(cls, plans: Sequence[SlotSeconds]) -> SlotSeconds:
        """Return plans of one slicing as one plan on the ranks of all, where each rank takes as long as in its own."""
        shapes = [plan.absent.shape for plan in plans]
        shape = (max(units for units, _ in shapes), sum(ranks for _, ranks in shapes))
        seconds, absent, opens = np.zeros((2, *shape)), np.ones(shape, dtype=np.bool_), np.ones(shape, dtype=np.bool_)
        first = 0
        for plan, (units, ranks) in zip(plans, shapes, strict=True):
            own = slice(first, first + ranks)
            seconds[:, :units, own], absent[:units, own], opens[:units, own] = plan.seconds, plan.absent, plan.opens
            first += ranks
        return cls(plans[0].slicing, seconds, absent, opens)


def slot_seconds(placed: PlacedRanks, stage: StageCost, slicing: Slicing) -> SlotSeconds:
    """Return the costs of an aligned plan of at least one sequence on stages of equal cost."""
    num_slices = slicing.num_slices
    num_slots = int(placed.orders.max()) + 1
    num_ranks = placed.num_ranks
    seqs = np.repeat(np.arange(len(placed.widths)), placed.widths)
    begins = np.cumsum(placed.widths) - placed.widths
    ranks = np.repeat(placed.first_ranks - begins, placed.widths) + np.arange(len(seqs))
    cells = placed.orders[seqs] * num_ranks + ranks
    labels = np.arange(num_slots * num_ranks)
    of_ring = seqs[placed.widths[seqs] > 1]
    labels[cells[placed.widths[seqs] > 1]] = placed.orders[of_ring] * num_ranks + placed.first_ranks[of_ring]
    is_first = labels == np.arange(num_slots * num_ranks)
    last = np.full(num_ranks, -1, dtype=np.int64)
    np.maximum.at(last, ranks, placed.orders[seqs])
    absent = last < np.arange(num_slots)[:, None]
    sums = _cell_seconds(placed, seqs, cells, stage, slicing, num_slots * num_ranks)
    slowest = np.maximum.reduceat(sums, np.flatnonzero(is_first), axis=-1)[..., np.cumsum(is_first) - 1]
    seconds = np.where(absent[:, None], 0.0, slowest.reshape(2, num_slices, num_slots, num_ranks).swapaxes(1, 2))
    return SlotSeconds(
        slicing,
        seconds.reshape(2, num_slots * num_slices, num_ranks),
        np.repeat(absent, num_slices, axis=0),
        np.repeat(is_first.reshape(num_slots, num_ranks), num_slices, axis=0),
    )


def run_pipelines(slots: SlotSeconds, num_stages: int) -> Floats:
    """Return when the last backward of each rank ends: [num_ranks]."""
    _, num_units, num_ranks = slots.seconds.shape
    free = np.zeros((num_stages, num_ranks))
    arrived = np.zeros((num_units, num_ranks))  # end of the latest action of each slice
    all_alone, all_present = bool(slots.opens.all()), not slots.absent.any()
    waves = action_waves(num_stages, num_units // slots.slicing.num_slices, slots.slicing)
    for kinds, units, stages in waves:
        starts = np.maximum(free[stages], arrived[units])
        if not all_alone:
            first = slots.opens[units].ravel()
            latest = np.maximum.reduceat(starts.ravel(), np.flatnonzero(first))
            starts = latest[np.cumsum(first) - 1].reshape(starts.shape)
        stops = starts + slots.seconds[kinds, units]
        arrived[units] = stops
        free[stages] = stops if all_present else np.where(slots.absent[units], free[stages], stops)
    return np.asarray(free.max(axis=0)) if num_units else np.zeros(num_ranks)


def _cell_seconds(
    placed: PlacedRanks, seqs: Ints, cells: Ints, stage: StageCost, slicing: Slicing, num_cells: int
) -> Floats:
    """Return the seconds of each rank's own shards of each slot, forward and backward: [2, slices, cells].

    ``seqs``, ``cells``: sequence and cell (slot x ranks + rank) of each shard: [shards].
    """
    lengths, widths = placed.lengths.astype(np.float64), placed.widths.astype(np.float64)
    cut = SliceShares.of(stage.both, lengths, widths, slicing)
    return np.array(
        [
            [cost.g + np.bincount(cells, weights=each[seqs], minlength=num_cells) for each in costs.T]
            for cost, (costs, _) in zip((stage.forward, stage.backward), cut.stage_costs(stage), strict=True)
        ]
    )


@lru_cache(maxsize=64)
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
