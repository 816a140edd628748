"""Packing of short sequences: best fit into packs (ByteScale section 5, Algorithm 1, line "pack"), or by work."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from bytescale_ext.plan.step.table import ragged_indices

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_WORD_BITS = 1024


class _ResidualSet:
    """A set of small integers that finds its smallest member >= x in a few integer operations.

    It is a bit set of two levels: bit v of word w is set for the member ``w * _WORD_BITS + v``, and the top level has a
    bit for each word that is not zero. A sorted list would move up to ``capacity`` entries at every change.
    """

    def __init__(self) -> None:
        self._words: dict[int, int] = {}
        self._top = 0

    def add(self, member: int) -> None:
        word, bit = divmod(member, _WORD_BITS)
        self._words[word] = self._words.get(word, 0) | (1 << bit)
        self._top |= 1 << word

    def remove(self, member: int) -> None:
        word, bit = divmod(member, _WORD_BITS)
        self._words[word] ^= 1 << bit
        if not self._words[word]:
            self._top ^= 1 << word

    def smallest_from(self, bound: int) -> int | None:
        """Return the smallest member that is at least ``bound``, or None."""
        word, bit = divmod(bound, _WORD_BITS)
        rest = self._words.get(word, 0) >> bit
        if rest:
            return bound + (rest & -rest).bit_length() - 1
        later = self._top >> (word + 1)
        if not later:
            return None
        word += (later & -later).bit_length()
        bits = self._words[word]
        return word * _WORD_BITS + (bits & -bits).bit_length() - 1


def pack_best_fit(lengths: Sequence[int], indices: Iterable[int], capacity: int) -> tuple[tuple[int, ...], ...]:
    """Pack sequences into few packs of at most ``capacity`` tokens, by best-fit-decreasing in about O(n log n).

    Longer sequences go first (tie: lower index). Each goes to the fullest pack that has room for it (tie: the oldest
    pack), or opens a new pack.

    Args:
        lengths: tokens of every sequence of the step.
        indices: indices of the sequences to pack, each at most once.
        capacity: largest number of tokens of a pack.

    Returns:
        Indices of the sequences of each pack, in the order of placing. Packs are in the order of their opening.

    Raises:
        ValueError: a sequence is empty or longer than ``capacity``.
    """
    sizes = [int(length) for length in lengths]
    order = sorted(sorted(indices), key=sizes.__getitem__, reverse=True)  # the sort is stable, also in reverse
    if order and sizes[order[0]] > capacity:
        raise ValueError(
            f"sequence {order[0]} has {sizes[order[0]]} tokens, more than a pack of {capacity} tokens holds; "
            f"raise the capacity or cut the sequence"
        )
    if order and sizes[order[-1]] < 1:
        raise ValueError(f"sequence {order[-1]} has {sizes[order[-1]]} tokens; drop it, a sequence needs at least 1")
    packs: list[list[int]] = []
    residuals = _ResidualSet()
    packs_with: dict[int, list[int]] = {}  # residual -> heap of the packs with this residual, oldest first
    for index in order:
        length = sizes[index]
        residual = residuals.smallest_from(length)
        if residual is None:
            pack, residual = len(packs), capacity
            packs.append([index])
        else:
            heap = packs_with[residual]
            pack = heapq.heappop(heap)
            if not heap:
                residuals.remove(residual)
            packs[pack].append(index)
        residual -= length
        if not residual:
            continue
        heap = packs_with.setdefault(residual, [])
        if not heap:
            residuals.add(residual)
        heapq.heappush(heap, pack)
    return tuple(tuple(pack) for pack in packs)


def deal_by_work(work: Floats, loads: Floats, speeds: Floats | None = None) -> Ints:
    """Deal items, in the given order, each to the bin where it ends first (tie: the fastest bin, the lowest index).

    With the most work first this is the longest-processing-time rule (Graham 1969): final loads differ by one item.

    Args:
        work: work of each item: [n].
        loads: initial load of each bin, in seconds: [bins].
        speeds: speed of each bin, [bins]; an item takes ``work / speed`` seconds. None: all are 1.

    Returns:
        Bin of each item: [n].
    """
    if speeds is not None:
        return _deal_by_speed(work, loads, speeds)
    heap = [(load, index) for index, load in enumerate(loads.tolist())]
    heapq.heapify(heap)
    bins = []
    for amount in work.tolist():
        load, index = heap[0]
        bins.append(index)
        heapq.heapreplace(heap, (load + amount, index))
    return np.array(bins, dtype=np.int64)


def _deal_by_speed(work: Floats, loads: Floats, speeds: Floats) -> Ints:
    """Return ``deal_by_work`` with a heap for each speed. ``work``: [n]; ``loads``, ``speeds``: [bins]."""
    heaps: list[tuple[float, list[tuple[float, int]]]] = []
    for speed in np.unique(speeds)[::-1].tolist():
        heap = [(float(loads[index]), int(index)) for index in np.flatnonzero(speeds == speed)]
        heapq.heapify(heap)
        heaps.append((speed, heap))
    bins = []
    for amount in work.tolist():
        speed, heap = min(heaps, key=lambda pair: pair[1][0][0] + amount / pair[0])
        load, index = heap[0]
        bins.append(index)
        heapq.heapreplace(heap, (load + amount / speed, index))
    return np.array(bins, dtype=np.int64)


def split_into_packs(tokens: Ints, owners: Ints, capacity: int) -> Ints:
    """Pack the items of each owner best-fit in the given order, for all owners together.

    Args:
        tokens: tokens of each item, at most ``capacity``: [n].
        owners: owner of each item, from 0 on: [n].
        capacity: largest number of tokens of a pack.

    Returns:
        Pack of each item, numbered from 0 for each owner: [n].
    """
    packs = np.zeros(len(tokens), dtype=np.int64)
    if not len(tokens):
        return packs
    in_order = np.argsort(owners, kind="stable")
    counts = np.bincount(owners)
    begins = np.cumsum(counts) - counts
    by_count = np.argsort(-counts, kind="stable")  # owners with items left stay in front
    room = np.full((len(counts), 1), capacity, dtype=np.int64)
    for turn in range(int(counts.max())):
        active = int(np.searchsorted(-counts[by_count], -turn))
        items = in_order[begins[by_count[:active]] + turn]
        size = tokens[items]
        room_after = room[:active] - size[:, None]
        tightest = np.where(room_after < 0, capacity, room_after).argmin(axis=1)
        fits = room_after[np.arange(active), tightest] >= 0
        if not fits.all():  # the other items open a pack: an unused column, or a new column if all are used
            room = np.concatenate((room[:active], np.full((active, 1), capacity, dtype=np.int64)), axis=1)
            unused = (room == capacity).argmax(axis=1)
            tightest = np.where(fits, tightest, unused)
            if (room[:, -1] == capacity).all() and not (tightest == room.shape[1] - 1).any():
                room = room[:, :-1]
        packs[items] = tightest
        room[np.arange(active), tightest] -= size
    return packs


def fill_slots(tokens: Ints, work: Floats, owners: Ints, room: Ints, missing_seconds: Floats) -> Ints:
    """Give each item the slot of its owner that lacks the most work and has room for the item.

    Args:
        tokens: tokens of each item: [n].
        work: seconds of each item, most work first: [n].
        owners: owner of each item: [n].
        room: tokens that each slot can still take: [owners, slots].
        missing_seconds: seconds of work that each slot lacks, -inf for slots that take no items: [owners, slots].

    Returns:
        Slot of each item, or -1 if no slot has room for it: [n].
    """
    slots = np.full(len(tokens), -1, dtype=np.int64)
    if not len(tokens):
        return slots
    counts = np.bincount(owners, minlength=len(room))
    by_count = np.argsort(-counts, kind="stable")  # owners with items left stay in front
    places = np.empty_like(by_count)
    places[by_count] = np.arange(len(by_count))
    by_owner = np.argsort(owners, kind="stable")
    _, turns = ragged_indices(counts)
    by_turn = by_owner[np.argsort(turns * len(counts) + places[owners[by_owner]])]  # first items of all owners first
    stops = np.cumsum(np.bincount(turns)).tolist()
    room, missing = room[by_count], missing_seconds[by_count]
    for start, stop in pairwise([0, *stops]):
        items, active = by_turn[start:stop], np.arange(stop - start)
        size = tokens[items]
        fillable = np.where(room[: len(items)] >= size[:, None], missing[: len(items)], -np.inf)
        chosen = fillable.argmax(axis=1)
        fits = fillable[active, chosen] > -np.inf
        slots[items] = np.where(fits, chosen, -1)
        room[active, chosen] -= np.where(fits, size, 0)
        missing[active, chosen] -= np.where(fits, work[items], 0.0)
    return slots
