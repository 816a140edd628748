"""Build the plans of arrangements: put rings into slots, then fill shelves, front and end with the short sequences.

An array operation is slow to start. So the plans of several arrangements are built together, as one plan on the ranks
of all arrangements: arrangement i has the ranks from ``i * num_ranks`` on and the sequences from ``i * n`` on.
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
from bytescale_ext.plan.step.table import ragged_indices

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_ROOMS = (1.02, 1.15, 2.0)  # room for short sequences, as a multiple of their tokens; 2 always suffices
_RAMP = 0.75  # smaller slots at either end, as a multiple of 1 + ramp_slots


@dataclass(frozen=True, eq=False)
class SlottedRings:
    """The rings of all arrangements, in slots.

    Attributes:
        seqs: sequence of each ring: [rings].
        first_ranks, widths, slots: first rank, ranks and slot of each ring: [rings].
        tokens: tokens of each ring on each of its ranks: [rings].
        seconds: seconds of each ring on each of its ranks: [rings].
        slice_seconds: seconds of each slice on each rank, forward and backward: [2, rings, k].
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
        """Return the rings of all arrangements."""
        parts = [
            (
                number * len(step.lengths) + timed.span.rings,
                number * step.num_ranks + timed.span.first_ranks,
                timed.span.widths,
                np.repeat(slots, timed.span.counts),
                timed.tokens,
                timed.seconds,
            )
            for number, shelving in enumerate(shelvings)
            for timed, slots in zip(shelving.spans, shelving.slots, strict=True)
        ]
        slice_seconds = [timed.slice_seconds for shelving in shelvings for timed in shelving.spans]
        seqs, firsts, widths, slots, tokens, seconds = (np.concatenate(column) for column in zip(*parts, strict=True))
        return cls(seqs, firsts, widths, slots, tokens, seconds, np.concatenate(slice_seconds, axis=1))


@dataclass(frozen=True, eq=False)
class ShortSequences:
    """The short sequences of all arrangements, arrangement by arrangement.

    Attributes:
        seqs: index of each short sequence: [shorts].
        tokens: tokens of each short sequence: [shorts].
        work: seconds of each short sequence, with its share of the slot overhead: [shorts].
        stops: index after the last short sequence of each arrangement: [arrangements].
    """

    seqs: Ints
    tokens: Ints
    work: Floats
    stops: Ints

    @classmethod
    def of(cls, step: AlignedStep, shelvings: Sequence[Shelving]) -> ShortSequences:
        """Return the sequences of all arrangements that are not rings."""
        num_seqs = len(step.lengths)
        counts = np.array([num_seqs - shelving.num_rings for shelving in shelvings])
        seqs = np.concatenate([np.arange(shelving.num_rings, num_seqs) for shelving in shelvings])
        capacity = step.problem.tokens_per_rank
        packs = np.array([max(1.0, shelving.arrangement.pack * capacity) for shelving in shelvings])
        work = step.seconds[seqs] + np.repeat(step.slot_overhead / packs, counts) * step.lengths[seqs]
        numbers = np.repeat(np.arange(len(counts)) * num_seqs, counts) + seqs
        return cls(numbers, step.lengths[seqs], work, np.cumsum(counts))

    def deal(self, loads: Floats, speeds: Floats | None) -> Ints:
        """Deal the short sequences by work to the ranks of their arrangement. Return their ranks: [shorts].

        Args:
            loads: seconds that each rank of each arrangement already has: [arrangements, num_ranks].
            speeds: speed of each rank, [num_ranks]; None: all are 1.
        """
        begins = [0, *self.stops.tolist()]
        return np.concatenate(
            [
                number * loads.shape[1] + deal_by_work(self.work[begin:stop], loads[number], speeds)
                for number, (begin, stop) in enumerate(pairwise(begins))
            ]
        )


@dataclass(frozen=True, eq=False)
class ShelvedRings:
    """The arrangements with rings in slots and without short sequences. The ranks of all arrangements count as one.

    Attributes:
        rings: rings in slots.
        shorts: short sequences, not yet placed.
        packs: tokens of a micro-batch of short sequences on each rank: [ranks].
        spans: number of each rank's span: [ranks].
        fronts: slots of each rank before its first shelf: [ranks].
        ends: slots of each rank in front and shelves together: [ranks].
        missing_seconds: seconds that each rank's slot lacks to the height of its shelf, -inf without a shelf:
            [ranks, slots].
        room: tokens that each slot can still take: [ranks, slots].
        loads: seconds of the rings of each rank: [ranks].
        estimates: ``loads``, plus the time that the tallest slot adds in the ramps: [ranks].
    """

    rings: SlottedRings
    shorts: ShortSequences
    packs: Floats
    spans: Ints
    fronts: Ints
    ends: Ints
    missing_seconds: Floats
    room: Ints
    loads: Floats
    estimates: Floats


def shelve(step: AlignedStep, shelvings: Sequence[Shelving]) -> ShelvedRings:
    """Put the rings of all arrangements into their slots."""
    num_ranks, capacity = step.num_ranks, step.problem.tokens_per_rank
    fronts = np.repeat([shelving.front for shelving in shelvings], num_ranks)
    packs = np.repeat([shelving.arrangement.pack * capacity for shelving in shelvings], num_ranks)
    peaks = np.repeat([shelving.arrangement.peak * step.ramp_slots for shelving in shelvings], num_ranks)
    num_slots = max(shelving.front + len(slots) for shelving in shelvings for slots in shelving.slots)
    missing = np.full((len(fronts), num_slots), -np.inf)
    room = np.where(np.arange(num_slots) < fronts[:, None], capacity, 0)
    spans, ends = np.empty_like(fronts), np.empty_like(fronts)
    num_spans = 0
    for number, shelving in enumerate(shelvings):
        for timed, shelf_slots in zip(shelving.spans, shelving.slots, strict=True):
            own = slice(number * num_ranks + timed.span.first, number * num_ranks + timed.span.stop)
            spans[own], ends[own] = num_spans, shelving.front + len(shelf_slots)
            missing[own, shelf_slots], room[own, shelf_slots] = timed.heights, capacity
            num_spans += 1
    rings = SlottedRings.of(step, shelvings)
    shards, members = ragged_indices(rings.widths)
    ranks, slots, seconds = rings.first_ranks[shards] + members, rings.slots[shards], rings.seconds[shards]
    missing[ranks, slots] -= seconds
    room[ranks, slots] = np.maximum(capacity - rings.tokens[shards], 0)
    loads = np.bincount(ranks, seconds, len(fronts)) + step.slot_overhead * (ends - fronts)
    tallest = np.zeros(len(fronts))
    np.maximum.at(tallest, ranks, seconds)
    estimates = loads + peaks * np.maximum(tallest, step.cost.b * packs + step.slot_overhead)
    if (speeds := step.problem.cluster.unequal_speeds()) is not None:
        estimates /= np.tile(speeds, len(shelvings))
        packs *= np.tile(speeds / speeds.max(), len(shelvings))  # micro-batches of all ranks take equally long
    shorts = ShortSequences.of(step, shelvings)
    return ShelvedRings(rings, shorts, packs, spans, fronts, ends, missing, room, loads, estimates)


def place_shorts(step: AlignedStep, shelved: ShelvedRings, loads: Floats) -> tuple[PlacedRanks, Floats]:
    """Deal the short sequences to the ranks by ``loads``, [ranks], and fill shelves, front and end with them.

    Returns:
        The plans of all arrangements as one placement, and the seconds of short sequences on each rank: [ranks].
    """
    rings, shorts, num_arrangements = shelved.rings, shelved.shorts, len(shelved.shorts.stops)
    lengths = np.tile(step.lengths, num_arrangements)
    firsts, widths, slots = np.empty_like(lengths), np.ones_like(lengths), np.empty_like(lengths)
    firsts[rings.seqs], widths[rings.seqs], slots[rings.seqs] = rings.first_ranks, rings.widths, rings.slots
    speeds = step.problem.cluster.unequal_speeds()
    owners = shorts.deal(loads.reshape(num_arrangements, -1), speeds)
    rooms = np.full(len(loads), _ROOMS[0])
    short_slots = _short_slots(step, shelved, owners, rooms)
    for wider in _ROOMS[1:]:
        tight = np.unique(owners[short_slots < 0] // step.num_ranks)
        if not len(tight):
            break
        rooms.reshape(num_arrangements, -1)[tight] = wider
        short_slots = _short_slots(step, shelved, owners, rooms)
    firsts[shorts.seqs], slots[shorts.seqs] = owners, short_slots
    slots = compact_slots(firsts, slots, widths, shelved.spans)
    placed = PlacedRanks(len(loads), lengths, firsts, widths, slots, aligned=True)
    seconds = np.bincount(owners, shorts.work, len(loads))
    return placed, seconds if speeds is None else seconds / np.tile(speeds, num_arrangements)


def _short_slots(step: AlignedStep, shelved: ShelvedRings, owners: Ints, rooms: Floats) -> Ints:
    """Return the slot of each short sequence, or -1 if no slot has room for it: [shorts].

    Shelves are filled to their height. The rest goes before and after the shelves, in slots that rise and fall.

    Args:
        step, shelved: the step and its rings in slots.
        owners: rank of each short sequence: [shorts].
        rooms: least tokens that the end slots can take, as a multiple of the rank's short tokens: [ranks].
    """
    fronts, ends, shorts = shelved.fronts, shelved.ends, shelved.shorts
    capacity = step.problem.tokens_per_rank
    tokens = np.bincount(owners, shorts.tokens, len(ends))
    ramp = round(_RAMP * (1 + step.ramp_slots)) if step.num_stages > 1 else 0
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


def compact_slots(firsts: Ints, slots: Ints, widths: Ints, spans: Ints) -> Ints:
    """Renumber slots without the slots that no rank of a span uses and a rank's unused slots after its last ring: [n].

    Args:
        firsts, slots, widths: first rank, slot and ranks of each sequence: [n].
        spans: number of each rank's span: [ranks].
    """
    num_slots = int(slots.max()) + 1
    dense = _dense_numbers(spans[firsts], slots, (int(spans.max()) + 1, num_slots))
    rings = np.flatnonzero(widths > 1)
    shards, members = ragged_indices(widths[rings])
    last = np.full(len(spans), -1, dtype=np.int64)
    np.maximum.at(last, firsts[rings][shards] + members, dense[rings][shards])
    free = np.flatnonzero((widths == 1) & (dense > last[firsts]))
    ranks = firsts[free]
    dense[free] = last[ranks] + 1 + _dense_numbers(ranks, dense[free], (len(spans), num_slots))
    return dense


def _dense_numbers(owners: Ints, slots: Ints, shape: tuple[int, int]) -> Ints:
    """Return the index of each slot among the slots that its owner uses: [n], as the arguments.

    ``shape``: number of owners and of slots.
    """
    used = np.zeros(shape, dtype=np.bool_)
    used[owners, slots] = True
    return np.asarray((used.cumsum(axis=1) - 1)[owners, slots])


def sequence_seconds(step: AlignedStep, shelved: ShelvedRings) -> SequenceSeconds:
    """Return the seconds of the sequences of all arrangements."""
    rings = shelved.rings
    local = np.tile(step.local_seconds, (1, len(shelved.shorts.stops)))
    wide = rings.widths > 1
    local[:, rings.seqs[wide]] = 0.0
    return SequenceSeconds(step.slice_overheads, local, rings.seqs[wide], rings.slice_seconds[:, wide])
