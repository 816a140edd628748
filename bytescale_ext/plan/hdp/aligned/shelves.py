"""Rings in aligned slots: shelves of equal height over a region of ranks.

With pipelines the ranks of a ring wait for each other on every stage, and between its forward and its backward a
stage runs the next slots. So it is not enough that a ring's ranks are ready together: each slot should cost the same
on all of them. A slot is therefore a *shelf*: rings side by side over a whole region of ranks, with widths that make
them equally long. Ranks of different regions share no ring and need not keep pace; the longest sequences get their own
region (ByteScale section 6.2, insight 1: length levels in separate pipelines)::

    rank     0            32          48          64
    slot 3   |  120K tokens            | 30K | 28K |      one region up to rank 48, another after it
    slot 4   |  70K      |   66K       | 27K | 25K |
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from bytescale_ext.plan.step.sizes import Cluster

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_NONE = np.zeros(0, dtype=np.int64)
_PARTS = 16  # into which the interval of the height of a shelf is cut, twice


@dataclass(frozen=True, slots=True)
class Shelf:
    """Rings side by side.

    Attributes:
        rings: sequences, by their place among the rings: [n].
        first_ranks, widths: of each ring: [n].
    """

    rings: Ints
    first_ranks: Ints
    widths: Ints


@dataclass(frozen=True, eq=False)
class Region:
    """Ranks ``first .. stop - 1`` with their shelves, tallest first or nearly so."""

    first: int
    stop: int
    shelves: tuple[Shelf, ...]

    @cached_property
    def counts(self) -> list[int]:
        """Rings of each shelf."""
        return [len(shelf.rings) for shelf in self.shelves]

    @cached_property
    def rings(self) -> Ints:
        """Rings of all shelves, shelf by shelf: [rings]."""
        return np.concatenate([_NONE, *(shelf.rings for shelf in self.shelves)])

    @cached_property
    def first_ranks(self) -> Ints:
        """First rank of each ring: [rings]."""
        return np.concatenate([_NONE, *(shelf.first_ranks for shelf in self.shelves)])

    @cached_property
    def widths(self) -> Ints:
        """Ranks of each ring: [rings]."""
        return np.concatenate([_NONE, *(shelf.widths for shelf in self.shelves)])

    @cached_property
    def key(self) -> tuple[object, ...]:
        """Regions are equal if their keys are."""
        return self.first, self.stop, *(one.tobytes() for one in (self.rings, self.first_ranks, self.widths))


@dataclass(frozen=True, slots=True)
class RegionCut:
    """A region before its shelves are filled: ranks ``first .. stop - 1`` and rings ``begin .. end - 1``."""

    first: int
    stop: int
    begin: int
    end: int


@dataclass(frozen=True, eq=False)
class RingWork:
    """The rings of a step, longest first.

    Attributes:
        lengths: tokens: [n].
        seconds: work on one rank: [n].
        min_widths: the fewest ranks that memory allows: [n].
        max_widths: the most ranks over which the exchange still hides behind computing: [n].
        cluster: the ranks.
    """

    lengths: Ints
    seconds: Floats
    min_widths: Ints
    max_widths: Ints
    cluster: Cluster

    def widths(self, rings: Ints, heights: float | Floats, num_ranks: int) -> Ints:
        """Return the ranks of each ring that bring it nearest to a height; wide rings take whole nodes.

        Args:
            rings: their numbers: [n].
            heights: one, or several: [heights, 1].
            num_ranks: the most ranks of a ring.

        Returns:
            [n], or [heights, n].
        """
        node = self.cluster.node_ranks
        wanted = np.ceil(np.minimum(self.seconds[rings] / heights, num_ranks)).astype(np.int64)
        widths = np.minimum(np.maximum(wanted, self.min_widths[rings]), self.max_widths[rings])
        if node == self.cluster.num_ranks:
            return widths
        whole = np.minimum(-(-widths // node) * node, np.minimum(num_ranks, self.lengths[rings]))
        return np.asarray(np.where(widths > node, whole, widths))


def cut_regions(work: RingWork, height: float, budget: float, peak: float, max_regions: int) -> list[RegionCut]:
    """Cut the ranks into at most ``max_regions`` regions; the first one has the longest sequences.

    A region is as wide as its longest sequence needs to come to ``height``. It takes sequences until its ranks have
    ``budget`` seconds, less ``peak`` times the seconds of the longest one; the last region takes the rest.
    """
    num_ranks, node = work.cluster.num_ranks, work.cluster.node_ranks
    num_rings = len(work.seconds)
    widths = work.widths(np.arange(num_rings), height, num_ranks).tolist() if max_regions > 1 else []
    until = np.cumsum(work.seconds)  # seconds of a ring and all longer ones
    regions: list[RegionCut] = []
    first, begin, taken = 0, 0, 0.0
    while len(regions) + 1 < max_regions and begin < num_rings:
        width = -(-widths[begin] // node) * node if node < num_ranks else widths[begin]
        tallest = float(work.seconds[begin]) / width
        area = width * (budget - peak * tallest)
        end = max(begin + 1, int(until.searchsorted(taken + area, side="right")))
        if end >= num_rings or num_ranks - first - width < work.min_widths[end]:
            break
        regions.append(RegionCut(first, first + width, begin, end))
        first, begin, taken = first + width, end, float(until[end - 1])
    return [*regions, RegionCut(first, num_ranks, begin, num_rings)]


def fill_shelves(work: RingWork, cut: RegionCut, height: float) -> Region:
    """Put a region's rings on shelves of at most ``height``; a ring that is always higher gets its own shelf."""
    num_ranks = cut.stop - cut.first
    left = np.arange(cut.begin, cut.end)
    at_height = work.widths(left, height, num_ranks)
    shelves = []
    while len(left):
        wanted = at_height[left[:num_ranks] - cut.begin]
        fitting = max(1, int(wanted.cumsum().searchsorted(num_ranks, side="right")))
        taken = left[:fitting]
        widths = _level_widths(work, taken, height, num_ranks)
        if widths is None:
            widths = np.minimum(wanted[:fitting], num_ranks)
        in_order = np.argsort(-widths, kind="stable")
        firsts = _side_by_side(widths[in_order], num_ranks, work.cluster.node_ranks)
        is_placed = firsts >= 0
        placed = in_order[is_placed]
        shelves.append(Shelf(taken[placed], cut.first + firsts[is_placed], widths[placed]))
        waiting = np.ones(len(left), dtype=np.bool_)
        waiting[placed] = False
        left = left[waiting]
    return Region(cut.first, cut.stop, tuple(shelves))


def _level_widths(work: RingWork, rings: Ints, height: float, num_ranks: int) -> Ints | None:
    """Return the widths, [n], of the lowest shelf that holds these rings, [n], side by side on at most all ranks.

    Only heights below ``height`` are tried; None: none of them will do.
    """
    if len(rings) == 1:
        return np.minimum(work.widths(rings, height / _PARTS, num_ranks), num_ranks)
    best, low, part = None, 0.0, height / _PARTS
    for _ in range(2):
        heights = low + part * np.arange(1.0, _PARTS)
        widths = work.widths(rings, heights[:, None], num_ranks)
        fits = widths.sum(axis=1) <= num_ranks
        number = int(fits.argmax()) if fits[-1] else len(fits)  # the higher, the narrower
        if number < len(fits):
            best = widths[number]
        low, part = low + number * part, part / _PARTS
    return best


def _side_by_side(widths: Ints, num_ranks: int, node: int) -> Ints:
    """Return the first rank of each ring, widest first, or -1 where there is no room for it: [n], as ``widths``.

    A ring no wider than a node lies in one node.
    """
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
        else:  # whole unused nodes; the last one may be short
            first, stop = start, min(-(-(start + width) // node) * node, num_ranks)
            room, start = stop - start, stop
        firsts[number] = first
        if room > width:
            open_nodes[room - width].append(first + width)
    return firsts
