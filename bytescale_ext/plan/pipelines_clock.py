"""How long a plan of aligned slots takes with pipelines: the planner's own clock, one array operation for all ranks.

Every stage runs the slots in the order of 1F1B (PipeDream-Flush, Narayanan et al. 2021), and in aligned slots that
order is the same for all pipelines; one with fewer slots leaves the later ones out. So an action (forward or backward
of slot k on stage q) is computed for all ranks at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bytescale_ext.plan.cost import CostModel, StageCost
from bytescale_ext.plan.placed import PlacedRanks

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class SlotSeconds:
    """What an aligned plan costs.

    Attributes:
        seconds: of each slot on each rank, those of its slowest partner, forward and backward: [2, slots, ranks].
        absent: the slot is after the rank's last one: [slots, ranks].
        opens: the rank is the first of those that wait for each other in the slot: [slots, ranks].
    """

    seconds: Floats
    absent: npt.NDArray[np.bool_]
    opens: npt.NDArray[np.bool_]


def slot_seconds(placed: PlacedRanks, stage: StageCost) -> SlotSeconds:
    """The costs of an aligned plan of at least one sequence whose stages cost the same."""
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
    sums = [_cell_seconds(placed, seqs, cells, one, num_slots) for one in (stage.forward, stage.backward)]
    seconds = np.stack([np.maximum.reduceat(row, np.flatnonzero(is_first))[np.cumsum(is_first) - 1] for row in sums])
    seconds = np.where(absent, 0.0, seconds.reshape(2, num_slots, num_ranks))
    return SlotSeconds(seconds, absent, is_first.reshape(num_slots, num_ranks))


def run_pipelines(slots: SlotSeconds, num_stages: int) -> Floats:
    """When the last backward of each rank ends: [num_ranks]."""
    _, num_slots, num_ranks = slots.seconds.shape
    free = np.zeros((num_stages, num_ranks))
    arrived = np.zeros((num_slots, num_ranks))  # end of the latest action of each slot
    all_alone, all_present = bool(slots.opens.all()), not slots.absent.any()
    for kinds, numbers, stages in one_forward_one_backward(num_stages, num_slots):
        starts = np.maximum(free[stages], arrived[numbers])
        if not all_alone:
            first = slots.opens[numbers].ravel()
            latest = np.maximum.reduceat(starts.ravel(), np.flatnonzero(first))
            starts = latest[np.cumsum(first) - 1].reshape(starts.shape)
        stops = starts + slots.seconds[kinds, numbers]
        arrived[numbers] = stops
        free[stages] = stops if all_present else np.where(slots.absent[numbers], free[stages], stops)
    return np.asarray(free.max(axis=0)) if num_slots else np.zeros(num_ranks)


def _cell_seconds(placed: PlacedRanks, seqs: Ints, cells: Ints, cost: CostModel, num_slots: int) -> Floats:
    """Seconds of each rank's own shards of each slot: [num_slots * num_ranks]."""
    each = cost.sequence_costs(placed.lengths.astype(np.float64), placed.widths.astype(np.float64))
    return cost.g + np.bincount(cells, weights=each[seqs], minlength=num_slots * placed.num_ranks)


def one_forward_one_backward(num_stages: int, num_slots: int) -> list[tuple[Ints, Ints, Ints]]:
    """(0 forward or 1 backward, slot, stage) of all actions: in waves of actions that do not need each other."""
    lanes = []
    for stage in range(num_stages):
        ahead = min(num_stages - 1 - stage, num_slots)
        lane = [(0, slot) for slot in range(ahead)]
        for slot in range(num_slots):
            lane += [(0, ahead + slot)] if ahead + slot < num_slots else []
            lane.append((1, slot))
        lanes.append(lane)
    heads = [0] * num_stages
    passed = [0] * num_slots  # stages that a slot has passed, down and up again
    waves = []
    while any(head < len(lane) for head, lane in zip(heads, lanes, strict=True)):
        wave = []
        for stage, lane in enumerate(lanes):
            kind, slot = lane[heads[stage]] if heads[stage] < len(lane) else (0, -1)
            if slot >= 0 and passed[slot] == (2 * num_stages - 1 - stage if kind else stage):
                wave.append((kind, slot, stage))
        for _, slot, stage in wave:
            passed[slot] += 1
            heads[stage] += 1
        waves.append(wave)
    columns = [np.array(wave, dtype=np.int64).T for wave in waves]
    return [(kinds, slots, stages) for kinds, slots, stages in columns]
