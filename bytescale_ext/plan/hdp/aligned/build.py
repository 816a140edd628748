"""Build the plans of layouts: put the rings into slots, then fill shelves, front and end with the short sequences.

The plans of several layouts are built side by side, as one plan on the ranks of all, because array operations take
long to start: layout i has the ranks from ``i * num_ranks`` on, and the sequences from ``i * n`` on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from bytescale_ext.plan.hdp.aligned.clock import SequenceSeconds
from bytescale_ext.plan.hdp.aligned.shelving import Shelving
from bytescale_ext.plan.hdp.aligned.step import AlignedStep
from bytescale_ext.plan.hdp.packing import deal_by_work, fill_slots
from bytescale_ext.plan.step.placed import PlacedRanks
from bytescale_ext.plan.step.table import owned

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_ROOMS = (1.02, 1.15, 2.0)  # room for short sequences, as a multiple of their tokens; 2 always suffices
_RAMP = 0.75  # number of smaller slots at either end, as a share of the stages


@dataclass(frozen=True, eq=False)
class SlottedRings:
    """The rings of layouts.

    Attributes:
        seqs: the sequence of each: [rings].
        first_ranks, widths, slots: of each: [rings].
        tokens: of each on each of its ranks: [rings].
        seconds: of each on each of its ranks: [rings].
        slice_seconds: the same of its slices, forward and backward: [2, rings, k].
    """

    seqs: Ints
    first_ranks: Ints
    widths: Ints
    slots: Ints
    tokens: Ints
    seconds: Floats
    slice_seconds: Floats

    @classmethod
    def of(cls, step: AlignedStep, shelvings: Sequence[Shelving]) -> SlottedRings:
        """Return the rings of layouts side by side."""
        parts = [
            (
                number * len(step.lengths) + filled.region.rings,
                number * step.num_ranks + filled.region.first_ranks,
                filled.region.widths,
                np.repeat(slots, filled.region.counts),
                filled.tokens,
                filled.seconds,
            )
            for number, shelving in enumerate(shelvings)
            for filled, slots in zip(shelving.regions, shelving.slots, strict=True)
        ]
        slice_seconds = [filled.slice_seconds for shelving in shelvings for filled in shelving.regions]
        seqs, firsts, widths, slots, tokens, seconds = (np.concatenate(column) for column in zip(*parts, strict=True))
        return cls(seqs, firsts, widths, slots, tokens, seconds, np.concatenate(slice_seconds, axis=1))


@dataclass(frozen=True, eq=False)
class Shorts:
    """The short sequences of layouts, layout by layout.

    Attributes:
        seqs: the sequences: [shorts].
        tokens: of each: [shorts].
        work: seconds of each, with its share of launches: [shorts].
        stops: the index after the last sequence of each layout: [layouts].
    """

    seqs: Ints
    tokens: Ints
    work: Floats
    stops: Ints

    @classmethod
    def of(cls, step: AlignedStep, shelvings: Sequence[Shelving]) -> Shorts:
        """Return the sequences of layouts that are not rings."""
        num_seqs = len(step.lengths)
        counts = np.array([num_seqs - one.num_rings for one in shelvings])
        seqs = np.concatenate([np.arange(one.num_rings, num_seqs) for one in shelvings])
        packs = np.array([max(1.0, one.layout.pack * step.problem.tokens_per_rank) for one in shelvings])
        work = step.seconds[seqs] + np.repeat(step.launch / packs, counts) * step.lengths[seqs]
        numbers = np.repeat(np.arange(len(counts)) * num_seqs, counts) + seqs
        return cls(numbers, step.lengths[seqs], work, np.cumsum(counts))

    def dealt(self, loads: Floats) -> Ints:
        """Return the rank of each, dealt by work to the ranks of its layout: [shorts].

        ``loads``: seconds that each rank of each layout has already: [layouts, num_ranks].
        """
        begins = [0, *self.stops.tolist()]
        return np.concatenate(
            [
                number * loads.shape[1] + deal_by_work(self.work[begin:stop], loads[number])
                for number, (begin, stop) in enumerate(pairwise(begins))
            ]
        )


@dataclass(frozen=True, eq=False)
class ShelvedRings:
    """Several layouts side by side: rings are in slots, short sequences are not. The ranks of all layouts count as one.

    Attributes:
        rings: what is placed.
        shorts: what is not.
        packs: tokens of a short micro-batch on each rank: [ranks].
        regions: the number of each rank's region: [ranks].
        fronts: slots of each rank before its first shelf: [ranks].
        ends: slots of front and shelves of each rank: [ranks].
        missing_seconds: how many seconds each rank's slot is below the height of its shelf, -inf where there is none:
            [ranks, slots].
        room: tokens that the slot still holds: [ranks, slots].
        loads: seconds of each rank's rings: [ranks].
        estimates: the same, with what the tallest slot adds while stages fill and drain: [ranks].
    """

    rings: SlottedRings
    shorts: Shorts
    packs: Floats
    regions: Ints
    fronts: Ints
    ends: Ints
    missing_seconds: Floats
    room: Ints
    loads: Floats
    estimates: Floats


def shelve(step: AlignedStep, shelvings: Sequence[Shelving]) -> ShelvedRings:
    """Put the rings of layouts into their slots."""
    num_ranks, capacity = step.num_ranks, step.problem.tokens_per_rank
    fronts = np.repeat([one.front for one in shelvings], num_ranks)
    packs = np.repeat([one.layout.pack * capacity for one in shelvings], num_ranks)
    peaks = np.repeat([one.layout.peak * step.fill for one in shelvings], num_ranks)
    num_slots = max(one.front + len(slots) for one in shelvings for slots in one.slots)
    missing = np.full((len(fronts), num_slots), -np.inf)
    room = np.where(np.arange(num_slots) < fronts[:, None], capacity, 0)
    regions, ends = np.empty_like(fronts), np.empty_like(fronts)
    num_regions = 0
    for number, shelving in enumerate(shelvings):
        for filled, of_shelves in zip(shelving.regions, shelving.slots, strict=True):
            own = slice(number * num_ranks + filled.region.first, number * num_ranks + filled.region.stop)
            regions[own], ends[own] = num_regions, shelving.front + len(of_shelves)
            missing[own, of_shelves], room[own, of_shelves] = filled.heights, capacity
            num_regions += 1
    rings = SlottedRings.of(step, shelvings)
    shards, members = owned(rings.widths)
    ranks, slots, seconds = rings.first_ranks[shards] + members, rings.slots[shards], rings.seconds[shards]
    missing[ranks, slots] -= seconds
    room[ranks, slots] = np.maximum(capacity - rings.tokens[shards], 0)
    loads = np.bincount(ranks, seconds, len(fronts)) + step.launch * (ends - fronts)
    tallest = np.zeros(len(fronts))
    np.maximum.at(tallest, ranks, seconds)
    estimates = loads + peaks * np.maximum(tallest, step.cost.b * packs + step.launch)
    shorts = Shorts.of(step, shelvings)
    return ShelvedRings(rings, shorts, packs, regions, fronts, ends, missing, room, loads, estimates)


def with_shorts(step: AlignedStep, shelved: ShelvedRings, loads: Floats) -> tuple[PlacedRanks, Floats]:
    """Deal the short sequences to the ranks by ``loads``, [ranks], and fill shelves, front and end with them.

    Returns:
        The plans side by side, and the seconds of short sequences on each rank: [ranks].
    """
    rings, shorts, num_layouts = shelved.rings, shelved.shorts, len(shelved.shorts.stops)
    lengths = np.tile(step.lengths, num_layouts)
    firsts, widths, slots = np.empty_like(lengths), np.ones_like(lengths), np.empty_like(lengths)
    firsts[rings.seqs], widths[rings.seqs], slots[rings.seqs] = rings.first_ranks, rings.widths, rings.slots
    owners = shorts.dealt(loads.reshape(num_layouts, -1))
    rooms = np.full(len(loads), _ROOMS[0])
    found = _short_slots(step, shelved, owners, rooms)
    for wider in _ROOMS[1:]:
        tight = np.unique(owners[found < 0] // step.num_ranks)
        if not len(tight):
            break
        rooms.reshape(num_layouts, -1)[tight] = wider
        found = _short_slots(step, shelved, owners, rooms)
    firsts[shorts.seqs], slots[shorts.seqs] = owners, found
    slots = compact_slots(firsts, slots, widths, shelved.regions)
    placed = PlacedRanks(len(loads), lengths, firsts, widths, slots, aligned=True)
    return placed, np.bincount(owners, shorts.work, len(loads))


def _short_slots(step: AlignedStep, shelved: ShelvedRings, owners: Ints, rooms: Floats) -> Ints:
    """Return the slot of each short sequence, or -1 where no slot has room for it: [shorts].

    Shelves are filled to their height; the rest rises in front of them and falls behind.

    Args:
        step, shelved: what is laid out.
        owners: the rank of each short sequence: [shorts].
        rooms: tokens that the slots at the end hold at least, as a multiple of the rank's short tokens: [ranks].
    """
    fronts, ends, shorts = shelved.fronts, shelved.ends, shelved.shorts
    capacity = step.problem.tokens_per_rank
    tokens = np.bincount(owners, shorts.tokens, len(ends))
    ramp = round(_RAMP * (1 + step.fill)) if step.num_stages > 1 else 0
    fewest, packs = np.ceil(rooms * tokens / capacity), np.ceil(tokens / shelved.packs)
    last = ends + np.maximum(fewest, packs + ramp // 2 - fronts).astype(np.int64)
    slot = np.arange(int(last.max()))
    missing = np.full((len(ends), len(slot)), -np.inf)
    missing[:, : shelved.missing_seconds.shape[1]] = shelved.missing_seconds
    room = np.zeros(missing.shape, dtype=np.int64)
    room[:, : shelved.room.shape[1]] = shelved.room
    is_end = (slot >= ends[:, None]) & (slot < last[:, None])
    room[is_end] = capacity
    falling = np.minimum(1.0, (last[:, None] - slot - 0.5) / max(ramp, 0.5))
    rising = np.minimum(1.0, (slot + 1) / (ramp + 1))
    weights = np.where(is_end, falling, np.where(slot < fronts[:, None], rising, 0.0))
    spare = np.bincount(owners, shorts.work, len(ends)) - np.maximum(missing, 0.0).sum(axis=1)
    share = weights * (np.maximum(spare, 0.0) / np.maximum(weights.sum(axis=1), 1e-300))[:, None]
    return fill_slots(shorts.tokens, shorts.work, owners, room, np.where(weights > 0, share, missing))


def compact_slots(firsts: Ints, slots: Ints, widths: Ints, regions: Ints) -> Ints:
    """Leave out slots that no rank of a region uses, and unused slots of a rank after its last ring: [n].

    Args:
        firsts, slots, widths: of each sequence: [n].
        regions: the number of each rank's region: [ranks].
    """
    num_slots = int(slots.max()) + 1
    dense = _numbered(regions[firsts], slots, (int(regions.max()) + 1, num_slots))
    rings = np.flatnonzero(widths > 1)
    shards, members = owned(widths[rings])
    last = np.full(len(regions), -1, dtype=np.int64)
    np.maximum.at(last, firsts[rings][shards] + members, dense[rings][shards])
    free = np.flatnonzero((widths == 1) & (dense > last[firsts]))
    ranks = firsts[free]
    dense[free] = last[ranks] + 1 + _numbered(ranks, dense[free], (len(regions), num_slots))
    return dense


def _numbered(owners: Ints, slots: Ints, shape: tuple[int, int]) -> Ints:
    """Return the number of each slot among those that its owner uses: [n], as the arguments.

    ``shape``: owners and slots.
    """
    used = np.zeros(shape, dtype=np.bool_)
    used[owners, slots] = True
    return np.asarray((used.cumsum(axis=1) - 1)[owners, slots])


def sequence_seconds(step: AlignedStep, shelved: ShelvedRings) -> SequenceSeconds:
    """Return the seconds of the slices of each sequence of each layout."""
    rings = shelved.rings
    alone = np.tile(step.alone_seconds, (1, len(shelved.shorts.stops)))
    wide = rings.widths > 1
    alone[:, rings.seqs[wide]] = 0.0
    return SequenceSeconds(step.launches, alone, rings.seqs[wide], rings.slice_seconds[:, wide])
