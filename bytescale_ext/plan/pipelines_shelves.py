"""Rings in aligned slots: shelves of equal height over a region of ranks.

With pipelines the ranks of a ring wait for each other on every stage, and between its forward and its backward a
stage runs the next slots. So it is not enough that a ring's ranks are ready together: each slot should cost the same
on all of them. A slot is therefore a *shelf*: rings side by side over a whole region of ranks, as wide as makes them
equally long. Ranks of different regions share no ring and need not keep pace; the longest sequences get a region of
their own (ByteScale section 6.2, insight 1: length levels in separate pipelines)::

    rank     0            32          48          64
    slot 3   |  120K tokens            | 30K | 28K |      one region up to rank 48, another after it
    slot 4   |  70K      |   66K       | 27K | 25K |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
RingSeconds = Callable[[Floats, Floats], Floats]
"""Seconds of sequences on each rank of their rings, from tokens and widths: [n] each."""

_HALVINGS = 8  # of the interval in which the height of a shelf is sought


@dataclass(frozen=True, slots=True)
class Shelf:
    """Rings side by side: sequences (by their place among the rings), first ranks and widths [n], and the height."""

    rings: Ints
    first_ranks: Ints
    widths: Ints
    height: float


@dataclass(frozen=True, slots=True)
class Region:
    """Ranks ``first .. stop - 1`` with their shelves, tallest first or nearly so."""

    first: int
    stop: int
    shelves: tuple[Shelf, ...]


@dataclass(frozen=True, slots=True)
class RingWork:
    """What a shelf must know of its rings, longest first.

    Attributes:
        seconds: work on one rank: [n].
        least, most: fewest ranks by memory, and the most over which the exchange still hides behind attention: [n].
        lengths: tokens: [n].
    """

    lengths: Floats
    seconds: Floats
    least: Ints
    most: Ints

    def widths(self, rings: Ints, height: float, num_ranks: int, node: int) -> Ints:
        """Ranks of each ring for this height, as near as they may come to it; whole nodes for the wide ones."""
        wanted = np.ceil(np.minimum(self.seconds[rings] / height, num_ranks)).astype(np.int64)
        widths = np.clip(wanted, self.least[rings], self.most[rings])
        whole = np.minimum(-(-widths // node) * node, np.minimum(num_ranks, self.lengths[rings].astype(np.int64)))
        return np.asarray(np.where(widths > node, whole, widths))


def cut_regions(
    work: RingWork, num_ranks: int, node: int, height: float, budget: float, peak: float, most: int
) -> list[tuple[int, int, int, int]]:
    """(first, stop, rings from, rings to) of at most ``most`` regions; the longest sequences come first.

    A region is as wide as its longest sequence wants for ``height`` and takes sequences until its ranks have
    ``budget`` seconds, less ``peak`` times the longest one's; the last region takes the rest.
    """
    regions: list[tuple[int, int, int, int]] = []
    first, begin, num_rings = 0, 0, len(work.seconds)
    while len(regions) + 1 < most and begin < num_rings:
        width = int(work.widths(np.array([begin]), height, num_ranks, node)[0])
        width = max(-(-width // node) * node, width) if node < num_ranks else width
        room = num_ranks - first - width
        tallest = float(work.seconds[begin]) / width
        area = width * (budget - peak * tallest)
        end = begin + max(1, int(np.searchsorted(np.cumsum(work.seconds[begin:]), area, side="right")))
        if end >= num_rings or room < work.least[end]:
            break
        regions.append((first, first + width, begin, end))
        first, begin = first + width, end
    regions.append((first, num_ranks, begin, num_rings))
    return regions


def fill_shelves(
    work: RingWork, first: int, stop: int, begin: int, end: int, node: int, height: float, seconds: RingSeconds
) -> Region:
    """Put the rings ``begin .. end - 1`` on shelves of at most ``height``; one that no width brings there is alone."""
    num_ranks = stop - first
    left = np.arange(begin, end)
    shelves = []
    while len(left):
        taken = left[:num_ranks]
        fitting = int(np.searchsorted(np.cumsum(work.widths(taken, height, num_ranks, node)), num_ranks, side="right"))
        taken = taken[: max(fitting, 1)]
        widths = _level_widths(work, taken, height, num_ranks, node)
        in_order = np.argsort(-widths, kind="stable")
        firsts = _side_by_side(widths[in_order], num_ranks, node)
        placed = in_order[firsts >= 0]
        rings = taken[placed]
        costs = seconds(work.lengths[rings], widths[placed].astype(np.float64))
        shelves.append(Shelf(rings, first + firsts[firsts >= 0], widths[placed], float(costs.max())))
        left = left[~np.isin(left, rings)]
    return Region(first, stop, tuple(shelves))


def _level_widths(work: RingWork, rings: Ints, height: float, num_ranks: int, node: int) -> Ints:
    """Widths of the lowest shelf that holds these rings side by side (at most all ranks together)."""
    low, high = 0.0, height
    best = np.minimum(work.widths(rings, height, num_ranks, node), num_ranks)
    if len(rings) == 1:
        return np.asarray(np.minimum(work.widths(rings, height / 16, num_ranks, node), num_ranks))
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        widths = work.widths(rings, middle, num_ranks, node)
        if widths.sum() <= num_ranks:
            best, high = widths, middle
        else:
            low = middle
    return best


def _side_by_side(widths: Ints, num_ranks: int, node: int) -> Ints:
    """First rank of each ring, widest first; -1 for one that finds no place. No narrow ring lies in two nodes."""
    if node >= num_ranks:
        firsts = np.cumsum(widths) - widths
        return np.where(firsts + widths <= num_ranks, firsts, -1)
    firsts = np.full(len(widths), -1, dtype=np.int64)
    open_nodes: list[list[int]] = [[] for _ in range(node + 1)]  # by free ranks: the first free rank of each
    start = 0  # no rank from here on is in use
    for number, width in enumerate(widths.tolist()):
        room = next((room for room in range(width, node + 1) if open_nodes[room]), 0)
        if not room and start + width > num_ranks:
            continue
        if room:
            first = open_nodes[room].pop()
        else:  # whole nodes that nobody uses; the last one may be short
            first, stop = start, min(-(-(start + width) // node) * node, num_ranks)
            room, start = stop - start, stop
        firsts[number] = first
        if room > width:
            open_nodes[room - width].append(first + width)
    return firsts
