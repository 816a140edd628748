"""Build the plan of a layout: shelve the rings, then fill shelves, front and end with the short sequences."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bytescale_ext.plan.hdp.aligned.layouts import Layout
from bytescale_ext.plan.hdp.aligned.shelves import Region, RingWork, Shelf, cut_regions, fill_shelves
from bytescale_ext.plan.hdp.aligned.step import AlignedStep
from bytescale_ext.plan.hdp.packing import deal_by_work, fill_slots
from bytescale_ext.plan.step.placed import PlacedRanks

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_ROOMS = (1.02, 1.15, 2.0)  # room for short sequences, as a multiple of their tokens; 2 always suffices
_RAMP = 0.75  # number of smaller slots at either end, as a share of the stages


@dataclass(frozen=True, eq=False)
class ShelvedRings:
    """Rings in their slots, before short sequences are added.

    Attributes:
        regions: see ``Region``.
        num_rings: the first ``num_rings`` sequences are rings.
        front: slots before the first shelf.
        ends: slots of front and shelves of each rank: [num_ranks].
        first_ranks, widths, slots: of each sequence: [n].
        missing_seconds: how many seconds each rank's slot is below the height of its shelf, -inf where there is none:
            [ranks, slots].
        room: tokens that the slot still holds: [ranks, slots].
        loads: seconds of each rank's rings: [num_ranks].
        tallest: seconds of each rank's tallest ring: [num_ranks].
        pack_seconds: seconds of a short micro-batch of the layout's size.
    """

    regions: tuple[Region, ...]
    num_rings: int
    front: int
    ends: Ints
    first_ranks: Ints
    widths: Ints
    slots: Ints
    missing_seconds: Floats
    room: Ints
    loads: Floats
    tallest: Floats
    pack_seconds: float


def shelve(step: AlignedStep, layout: Layout) -> ShelvedRings:
    """Cut regions, put their rings on shelves, and give the shelves their slots."""
    cost, num_ranks, capacity = step.cost, step.num_ranks, step.problem.tokens_per_rank
    regions, num_rings = _regions(step, layout)
    front = round(layout.front * (1 + step.fill)) if step.num_stages > 1 else 0
    num_slots = front + max(len(region.shelves) for region in regions)
    firsts, slots = (np.zeros(len(step.lengths), dtype=np.int64) for _ in range(2))
    widths = np.ones(len(step.lengths), dtype=np.int64)
    ends = np.full(num_ranks, front, dtype=np.int64)
    missing = np.full((num_ranks, num_slots), -np.inf)
    room = np.zeros((num_ranks, num_slots), dtype=np.int64)
    room[:, :front] = capacity
    loads, tallest = np.zeros(num_ranks), np.zeros(num_ranks)
    for region in regions:
        ranks = slice(region.first, region.stop)
        ends[ranks] += len(region.shelves)
        for place, number in enumerate(_rising_and_falling(region.shelves, layout.before)):
            shelf, slot = region.shelves[number], front + place
            firsts[shelf.rings], widths[shelf.rings], slots[shelf.rings] = shelf.first_ranks, shelf.widths, slot
            own, tokens = _on_ranks(step, shelf)
            missing[ranks, slot] = shelf.height - own[ranks]
            room[ranks, slot] = np.maximum(capacity - tokens[ranks], 0)
            loads[ranks] += own[ranks] + step.launch
            tallest[ranks] = np.maximum(tallest[ranks], own[ranks])
    pack_seconds = cost.b * layout.pack * capacity + step.launch
    return ShelvedRings(
        regions, num_rings, front, ends, firsts, widths, slots, missing, room, loads, tallest, pack_seconds
    )


def _regions(step: AlignedStep, layout: Layout) -> tuple[tuple[Region, ...], int]:
    """Return the regions with their shelves, and how many sequences are rings."""
    problem, num_ranks = step.problem, step.num_ranks
    mean = float(step.seconds.sum()) / num_ranks
    height = max(layout.height * mean, 1e-300)
    most = np.minimum(step.hidden_widths * layout.spread, num_ranks).astype(np.int64)
    most = np.maximum(np.minimum(most, step.lengths), problem.min_widths)
    is_long = step.lengths > problem.tokens_per_rank
    num_rings = int((is_long | ((step.seconds > height) & (most > 1))).sum())
    rings = slice(0, num_rings)
    work = RingWork(
        step.lengths[rings].astype(np.float64),
        step.seconds[rings],
        problem.min_widths[rings],
        most[rings],
        problem.cluster,
        step.ring_seconds,
    )
    cuts = cut_regions(work, height, layout.budget * mean, layout.peak * step.fill, layout.num_regions)
    return tuple(fill_shelves(work, cut, height) for cut in cuts), num_rings


def _on_ranks(step: AlignedStep, shelf: Shelf) -> tuple[Floats, Ints]:
    """Return the seconds and tokens of a shelf's rings on each rank: [num_ranks] each."""
    own, tokens = np.zeros(step.num_ranks), np.zeros(step.num_ranks, dtype=np.int64)
    ranks = np.repeat(shelf.first_ranks - (np.cumsum(shelf.widths) - shelf.widths), shelf.widths)
    ranks += np.arange(len(ranks))
    own[ranks] = np.repeat(shelf.seconds, shelf.widths)
    tokens[ranks] = np.repeat(-(-step.lengths[shelf.rings] // shelf.widths), shelf.widths)
    return own, tokens


def _rising_and_falling(shelves: tuple[Shelf, ...], before: float) -> list[int]:
    """Return the order of a region's shelves: ``before`` of them rise to the tallest, the others fall."""
    heights = np.array([shelf.height for shelf in shelves])
    rising: list[int] = []
    falling: list[int] = []
    for number in np.argsort(-heights, kind="stable").tolist():
        is_rising = len(rising) < before * len(rising + falling)
        (rising if is_rising and falling else falling).append(number)
    return rising[::-1] + falling


@dataclass(frozen=True, eq=False)
class _Shorts:
    """Short sequences, the seconds of each with its share of launches, and the rank that each is dealt to: [n] each."""

    seqs: Ints
    work: Floats
    ranks: Ints


def with_shorts(step: AlignedStep, layout: Layout, shelved: ShelvedRings, loads: Floats) -> tuple[PlacedRanks, Floats]:
    """Deal the short sequences to the ranks by ``loads``, [num_ranks], and fill shelves, front and end with them.

    Returns:
        The plan, and the seconds of short sequences on each rank: [num_ranks].
    """
    seqs = np.arange(shelved.num_rings, len(step.lengths))
    pack = max(1.0, layout.pack * step.problem.tokens_per_rank)
    work = step.seconds[seqs] + step.launch / pack * step.lengths[seqs]
    shorts = _Shorts(seqs, work, deal_by_work(work, loads))
    firsts, slots = shelved.first_ranks.copy(), shelved.slots.copy()
    firsts[seqs] = shorts.ranks
    for room in _ROOMS:
        slots[seqs] = _short_slots(step, layout, shelved, shorts, room)
        if (slots[seqs] >= 0).all():
            break
    slots = compact_slots(firsts, slots, shelved.widths, shelved.regions)
    placed = PlacedRanks(step.num_ranks, step.lengths, firsts, shelved.widths, slots, aligned=True)
    seconds = np.bincount(shorts.ranks, weights=work, minlength=step.num_ranks).astype(np.float64)
    return placed, seconds


def _short_slots(step: AlignedStep, layout: Layout, shelved: ShelvedRings, shorts: _Shorts, room: float) -> Ints:
    """Return the slot of each short sequence, or -1 where no slot has room for it: [shorts].

    Shelves are filled to their height; the rest rises in front of them and falls behind. ``room``: tokens that the
    slots at the end hold at least, as a multiple of the rank's short tokens.
    """
    front, ends, ranks, work = shelved.front, shelved.ends, shorts.ranks, shorts.work
    capacity = step.problem.tokens_per_rank
    tokens = step.lengths[shorts.seqs]
    of_rank = np.bincount(ranks, weights=tokens, minlength=step.num_ranks)
    ramp = round(_RAMP * (1 + step.fill)) if step.num_stages > 1 else 0
    fewest = np.ceil(room * of_rank / capacity)
    packs = np.ceil(of_rank / (layout.pack * capacity))
    num_ends = np.maximum(fewest, packs + ramp // 2 - front).astype(np.int64)
    slot = np.arange(int((ends + num_ends).max()))
    missing = np.full((step.num_ranks, len(slot)), -np.inf)
    missing[:, : shelved.missing_seconds.shape[1]] = shelved.missing_seconds
    rooms = np.zeros(missing.shape, dtype=np.int64)
    rooms[:, : shelved.room.shape[1]] = shelved.room
    last = (ends + num_ends)[:, None]
    is_end = (slot >= ends[:, None]) & (slot < last)
    rooms[is_end] = capacity
    weights = np.where(is_end, np.minimum(1.0, (last - slot - 0.5) / max(ramp, 0.5)), 0.0)
    weights[:, :front] = np.minimum(1.0, np.arange(1, front + 1) / (ramp + 1))
    spare = np.bincount(ranks, weights=work, minlength=step.num_ranks).astype(np.float64)
    spare -= np.where(np.isfinite(missing), np.clip(missing, 0.0, None), 0.0).sum(axis=1)
    share = weights * (np.maximum(spare, 0.0) / np.maximum(weights.sum(axis=1), 1e-300))[:, None]
    return fill_slots(tokens, work, ranks, rooms, np.where(weights > 0, share, missing))


def compact_slots(firsts: Ints, slots: Ints, widths: Ints, regions: tuple[Region, ...]) -> Ints:
    """Leave out slots that no rank of a region uses, and unused slots of a rank after its last ring: [n] all."""
    dense = slots.copy()
    for region in regions:
        inside = (firsts >= region.first) & (firsts < region.stop)
        dense[inside] = np.unique(dense[inside], return_inverse=True)[1]
    num_ranks = max((region.stop for region in regions), default=0)
    last = np.full(num_ranks + 1, -1, dtype=np.int64)
    in_ring = np.flatnonzero(widths > 1)
    for seq in in_ring.tolist():
        window = slice(firsts[seq], firsts[seq] + widths[seq])
        last[window] = np.maximum(last[window], dense[seq])
    free = np.flatnonzero((widths == 1) & (dense > last[firsts]))
    keys, inverse = np.unique(firsts[free] * (int(dense.max(initial=0)) + 1) + dense[free], return_inverse=True)
    owners = keys // (int(dense.max(initial=0)) + 1)
    begins = np.searchsorted(owners, owners)
    dense[free] = last[firsts[free]] + 1 + (np.arange(len(keys)) - begins)[inverse]
    return dense
