"""Partition of items by work: equal work in each part, optionally equal counts or a capacity.

Items are dealt by the longest-processing-time rule (Graham 1969). Exchanges of items with the fullest part then level
the parts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_ROUNDS = 20  # most exchanges for each part
_LEAST_GAIN = 1e-9  # smallest gain of an exchange, relative to the fullest part


@dataclass(frozen=True)
class Limits:
    """Limits of each part.

    Attributes:
        num_parts: number of parts.
        most_items: largest number of items of a part.
        equal_counts: whether all parts keep the number of items that they were dealt.
        sizes: size of each item: [n].
        capacity: largest total size of a part; None: no limit.
    """

    num_parts: int
    most_items: int
    equal_counts: bool
    sizes: Ints
    capacity: int | None = None


def partition(work: Floats, limits: Limits) -> Ints | None:
    """Return the part of each item, [n], or None if the parts were full before all items were dealt.

    No part is empty. Equal arguments give equal parts.

    Args:
        work: work of each item, at least as many items as parts: [n].
        limits: limits of the parts.
    """
    parts = _deal(work, limits)
    if parts is None:
        return None
    loads = np.bincount(parts, weights=work, minlength=limits.num_parts)
    for _ in range(_ROUNDS * limits.num_parts):
        if not _exchange(work, limits, parts, loads):
            break
    return parts


def _deal(work: Floats, limits: Limits) -> Ints | None:
    """Return the part of each item after dealing, or None: [n]; ``work``: [n]."""
    loads, counts = np.zeros(limits.num_parts), np.zeros(limits.num_parts, dtype=np.int64)
    room = np.full(limits.num_parts, limits.capacity or np.iinfo(np.int64).max)
    parts = np.zeros(len(work), dtype=np.int64)
    in_order = np.argsort(-work, kind="stable").tolist()
    for rank, item in enumerate(in_order):
        is_open = (counts < limits.most_items) & (room >= limits.sizes[item])
        if len(in_order) - rank <= int((counts == 0).sum()):
            is_open &= counts == 0  # the last items fill empty parts
        if not is_open.any():
            return None
        part = int(np.where(is_open, loads, np.inf).argmin())
        parts[item] = part
        loads[part] += work[item]
        counts[part] += 1
        room[part] -= limits.sizes[item]
    return parts


def _exchange(work: Floats, limits: Limits, parts: Ints, loads: Floats) -> bool:
    """Exchange an item of the fullest part, in place, so that the fuller of both parts has the least work.

    Without equal counts, an item may also move alone.

    Args:
        work: work of each item: [n].
        limits: limits of the parts.
        parts: part of each item: [n].
        loads: work of each part: [num_parts].

    Returns:
        Whether an exchange was found.
    """
    fullest = int(loads.argmax())
    given, others = np.flatnonzero(parts == fullest), np.flatnonzero(parts != fullest)
    owners, returned, sizes = parts[others], work[others], limits.sizes[others]
    if not limits.equal_counts and len(given) > 1:
        counts = np.bincount(parts, minlength=limits.num_parts)
        receivers = np.flatnonzero((counts < limits.most_items) & (np.arange(limits.num_parts) != fullest))
        owners, returned = np.append(owners, receivers), np.append(returned, np.zeros(len(receivers)))
        sizes = np.append(sizes, np.zeros(len(receivers), dtype=np.int64))
    moved = work[given][:, None] - returned
    after = np.maximum(loads[fullest] - moved, loads[owners] + moved)
    if limits.capacity is not None:
        totals = np.bincount(parts, weights=limits.sizes, minlength=limits.num_parts)
        size = limits.sizes[given][:, None] - sizes
        fits = (totals[fullest] - size <= limits.capacity) & (totals[owners] + size <= limits.capacity)
        after = np.where(fits, after, np.inf)
    if not after.size or after.min() >= loads[fullest] * (1.0 - _LEAST_GAIN):
        return False
    row, column = np.unravel_index(int(after.argmin()), after.shape)
    part, amount = int(owners[column]), float(moved[row, column])
    parts[given[row]] = part
    if column < len(others):
        parts[others[column]] = fullest
    loads[fullest] -= amount
    loads[part] += amount
    return True
