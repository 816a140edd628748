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

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bytescale_ext.plan.step.sizes import Cluster

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
RingSeconds = Callable[[Floats, Floats], Floats]
"""Seconds of sequences on each rank of their rings, from tokens and widths: [n] each."""

_HALVINGS = 8  # of the interval in which the height of a shelf is sought


@dataclass(frozen=True, slots=True)
class Shelf:
    """Rings side by side.

    Attributes:
        rings: sequences, by their place among the rings: [n].
        first_ranks, widths: of each ring: [n].
        seconds: of each ring on each of its ranks: [n].
    """

    rings: Ints
    first_ranks: Ints
    widths: Ints
    seconds: Floats

    @property
    def height(self) -> float:
        """Seconds of the longest ring."""
        return float(self.seconds.max())


@dataclass(frozen=True, slots=True)
class Region:
    """Ranks ``first .. stop - 1`` with their shelves, tallest first or nearly so."""

    first: int
    stop: int
    shelves: tuple[Shelf, ...]


@dataclass(frozen=True, slots=True)
class RegionCut:
    """A region before its shelves are filled: ranks ``first .. stop - 1`` and rings ``begin .. end - 1``."""

    first: int
    stop: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class RingWork:
    """The rings of a step, longest first.

    Attributes:
        lengths: tokens: [n].
        seconds: work on one rank: [n].
        min_widths: the fewest ranks that memory allows: [n].
        max_widths: the most ranks over which the exchange still hides behind computing: [n].
        cluster: the ranks.
        ring_seconds: seconds of sequences on each rank of their rings.
    """

    lengths: Floats
    seconds: Floats
    min_widths: Ints
    max_widths: Ints
    cluster: Cluster
    ring_seconds: RingSeconds

    def widths(self, rings: Ints, height: float, num_ranks: int) -> Ints:
        """Return the ranks of each ring that bring it nearest to this height; wide rings take whole nodes.

        ``rings``: their numbers, [n], as the result; ``num_ranks``: the most ranks of one.
        """
        node = self.cluster.node_ranks
        wanted = np.ceil(np.minimum(self.seconds[rings] / height, num_ranks)).astype(np.int64)
        widths = np.clip(wanted, self.min_widths[rings], self.max_widths[rings])
        whole = np.minimum(-(-widths // node) * node, np.minimum(num_ranks, self.lengths[rings].astype(np.int64)))
        return np.asarray(np.where(widths > node, whole, widths))


def cut_regions(work: RingWork, height: float, budget: float, peak: float, max_regions: int) -> list[RegionCut]:
    """Cut the ranks into at most ``max_regions`` regions; the first one has the longest sequences.

    A region is as wide as its longest sequence needs to come to ``height``. It takes sequences until its ranks have
    ``budget`` seconds, less ``peak`` times the seconds of the longest one; the last region takes the rest.
    """
    num_ranks, node = work.cluster.num_ranks, work.cluster.node_ranks
    regions: list[RegionCut] = []
    first, begin, num_rings = 0, 0, len(work.seconds)
    while len(regions) + 1 < max_regions and begin < num_rings:
        width = int(work.widths(np.array([begin]), height, num_ranks)[0])
        width = max(-(-width // node) * node, width) if node < num_ranks else width
        room = num_ranks - first - width
        tallest = float(work.seconds[begin]) / width
        area = width * (budget - peak * tallest)
        end = begin + max(1, int(np.searchsorted(np.cumsum(work.seconds[begin:]), area, side="right")))
        if end >= num_rings or room < work.min_widths[end]:
            break
        regions.append(RegionCut(first, first + width, begin, end))
        first, begin = first + width, end
    return [*regions, RegionCut(first, num_ranks, begin, num_rings)]


def fill_shelves(work: RingWork, cut: RegionCut, height: float) -> Region:
    """Put a region's rings on shelves of at most ``height``; a ring that is always higher gets its own shelf."""
    num_ranks = cut.stop - cut.first
    left = np.arange(cut.begin, cut.end)
    shelves = []
    while len(left):
        taken = left[:num_ranks]
        fitting = int(np.searchsorted(np.cumsum(work.widths(taken, height, num_ranks)), num_ranks, side="right"))
        taken = taken[: max(fitting, 1)]
        widths = _level_widths(work, taken, height, num_ranks)
        in_order = np.argsort(-widths, kind="stable")
        firsts = _side_by_side(widths[in_order], num_ranks, work.cluster.node_ranks)
        placed = in_order[firsts >= 0]
        rings = taken[placed]
        costs = work.ring_seconds(work.lengths[rings], widths[placed].astype(np.float64))
        shelves.append(Shelf(rings, cut.first + firsts[firsts >= 0], widths[placed], costs))
        left = left[~np.isin(left, rings)]
    return Region(cut.first, cut.stop, tuple(shelves))


def _level_widths(work: RingWork, rings: Ints, height: float, num_ranks: int) -> Ints:
    """Return the widths, [n], of the lowest shelf that holds these rings, [n], side by side on at most all ranks."""
    low, high = 0.0, height
    best = np.minimum(work.widths(rings, height, num_ranks), num_ranks)
    if len(rings) == 1:
        return np.asarray(np.minimum(work.widths(rings, height / 16, num_ranks), num_ranks))
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        widths = work.widths(rings, middle, num_ranks)
        if widths.sum() <= num_ranks:
            best, high = widths, middle
        else:
            low = middle
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
