"""Rings in aligned slots: shelves of equal height over a span of ranks.

With pipelines the ranks of a ring wait for each other on every stage, and between the forward and the backward pass of
the ring a stage runs the next slots. So each slot should cost the same on all ranks of the ring. A slot is therefore a
*shelf*: rings side by side over a whole span of ranks, with widths that make them equally slow. Ranks of different
spans share no ring and need not keep pace. The longest sequences get their own span (ByteScale section 6.2, insight 1:
length levels in separate pipelines)::

    rank     0            32          48          64
    slot 3   |  120K tokens            | 30K | 28K |      a span up to rank 48, and a span after it
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

_EMPTY = np.zeros(0, dtype=np.int64)
_PARTS = 16  # candidates for the height of a shelf in each of two rounds, the second between two of the first


@dataclass(frozen=True, slots=True)
class Shelf:
    """Rings side by side.

    Attributes:
        rings: indices of the sequences: [n].
        first_ranks, widths: first rank and ranks of each ring: [n].
    """

    rings: Ints
    first_ranks: Ints
    widths: Ints


@dataclass(frozen=True, eq=False)
class RankSpan:
    """Ranks ``first .. stop - 1`` with their shelves, roughly by falling height."""

    first: int
    stop: int
    shelves: tuple[Shelf, ...]

    @cached_property
    def counts(self) -> list[int]:
        """Number of rings on each shelf."""
        return [len(shelf.rings) for shelf in self.shelves]

    @cached_property
    def rings(self) -> Ints:
        """Rings of all shelves, shelf by shelf: [rings]."""
        return np.concatenate([_EMPTY, *(shelf.rings for shelf in self.shelves)])

    @cached_property
    def first_ranks(self) -> Ints:
        """First rank of each ring: [rings]."""
        return np.concatenate([_EMPTY, *(shelf.first_ranks for shelf in self.shelves)])

    @cached_property
    def widths(self) -> Ints:
        """Ranks of each ring: [rings]."""
        return np.concatenate([_EMPTY, *(shelf.widths for shelf in self.shelves)])

    @cached_property
    def key(self) -> tuple[object, ...]:
        """Content of the span: spans are equal if their keys are equal."""
        return self.first, self.stop, *(column.tobytes() for column in (self.rings, self.first_ranks, self.widths))


@dataclass(frozen=True, slots=True)
class EmptySpan:
    """A rank span without shelves: ranks ``first .. stop - 1`` for rings ``begin .. end - 1``."""

    first: int
    stop: int
    begin: int
    end: int


@dataclass(frozen=True, eq=False)
class RingWork:
    """The rings of a step, longest first.

    Attributes:
        lengths: tokens of each ring: [n].
        seconds: seconds of each ring if it ran on one rank: [n].
        min_widths: the fewest ranks that hold each ring: [n].
        max_widths: largest number of ranks that each ring may have: [n].
        cluster: the ranks.
    """

    lengths: Ints
    seconds: Floats
    min_widths: Ints
    max_widths: Ints
    cluster: Cluster

    def widths(self, rings: Ints, heights: float | Floats, num_ranks: int) -> Ints:
        """Return the fewest ranks with which each ring is at most as high as given, within the limits of its width.

        Rings wider than a node take whole nodes.

        Args:
            rings: indices of the rings: [n].
            heights: height in seconds, as a scalar or [heights, 1].
            num_ranks: largest number of ranks of a ring.

        Returns:
            Ranks of each ring: [n], or [heights, n].
        """
        node = self.cluster.node_ranks
        even_widths = np.ceil(np.minimum(self.seconds[rings] / heights, num_ranks)).astype(np.int64)
        widths = np.minimum(np.maximum(even_widths, self.min_widths[rings]), self.max_widths[rings])
        if node == self.cluster.num_ranks:
            return widths
        whole = np.minimum(-(-widths // node) * node, np.minimum(num_ranks, self.lengths[rings]))
        return np.asarray(np.where(widths > node, whole, widths))


def split_ranks(
    work: RingWork, whole: EmptySpan, height: float, budget: float, peak: float, max_spans: int
) -> list[EmptySpan]:
    """Split a span into at most ``max_spans`` spans. The first span has the longest sequences.

    A span is as wide as its longest sequence needs to be at most ``height`` seconds high. It takes sequences until each
    of its ranks has ``budget`` seconds, less ``peak`` times the seconds of its longest sequence. The last span takes
    the remaining sequences.
    """
    num_ranks, node = whole.stop - whole.first, work.cluster.node_ranks
    needed = work.widths(np.arange(whole.begin, whole.end), height, num_ranks) if max_spans > 1 else _EMPTY
    until = np.cumsum(work.seconds)  # seconds of each ring and all longer rings together
    spans: list[EmptySpan] = []
    first, begin = whole.first, whole.begin
    taken = float(until[begin - 1]) if begin else 0.0
    while len(spans) + 1 < max_spans and begin < whole.end:
        width = int(needed[begin - whole.begin])
        width = -(-width // node) * node if node < num_ranks else width
        tallest = float(work.seconds[begin]) / width
        area = width * (budget - peak * tallest)
        end = max(begin + 1, int(until.searchsorted(taken + area, side="right")))
        if end >= whole.end or whole.stop - first - width < work.min_widths[end]:
            break
        spans.append(EmptySpan(first, first + width, begin, end))
        first, begin, taken = first + width, end, float(until[end - 1])
    return [*spans, EmptySpan(first, whole.stop, begin, whole.end)]


def fill_shelves(work: RingWork, span: EmptySpan, height: float) -> RankSpan:
    """Put a span's rings on shelves of at most ``height``. A ring that is higher at every width gets its own shelf."""
    num_ranks = span.stop - span.first
    remaining = np.arange(span.begin, span.end)
    widths_at_height = work.widths(remaining, height, num_ranks)
    shelves = []
    while len(remaining):
        needed_widths = widths_at_height[remaining[:num_ranks] - span.begin]
        fitting = max(1, int(needed_widths.cumsum().searchsorted(num_ranks, side="right")))
        rings = remaining[:fitting]
        widths = _level_widths(work, rings, height, num_ranks)
        if widths is None:
            widths = np.minimum(needed_widths[:fitting], num_ranks)
        widest_first = np.argsort(-widths, kind="stable")
        firsts = _side_by_side(widths[widest_first], num_ranks, work.cluster.node_ranks)
        is_placed = firsts >= 0
        placed = widest_first[is_placed]
        shelves.append(Shelf(rings[placed], span.first + firsts[is_placed], widths[placed]))
        is_waiting = np.ones(len(remaining), dtype=np.bool_)
        is_waiting[placed] = False
        remaining = remaining[is_waiting]
    return RankSpan(span.first, span.stop, tuple(shelves))


def _level_widths(work: RingWork, rings: Ints, height: float, num_ranks: int) -> Ints | None:
    """Return the widths of the rings on the lowest shelf that has room for all of them: [n], as ``rings``.

    Only heights below ``height`` are tried. Returns None if no such shelf has room.
    """
    if len(rings) == 1:
        return np.minimum(work.widths(rings, height / _PARTS, num_ranks), num_ranks)
    best, low, part = None, 0.0, height / _PARTS
    for _ in range(2):
        heights = low + part * np.arange(1.0, _PARTS)
        widths = work.widths(rings, heights[:, None], num_ranks)
        fits = widths.sum(axis=1) <= num_ranks
        number = int(fits.argmax()) if fits[-1] else len(fits)  # rings of higher shelves are narrower
        if number < len(fits):
            best = widths[number]
        low, part = low + number * part, part / _PARTS
    return best


def _side_by_side(widths: Ints, num_ranks: int, node: int) -> Ints:
    """Return the first rank of each ring, widest first, or -1 if there is no room for it: [n], as ``widths``.

    A ring that is no wider than a node stays in one node.
    """
    if node >= num_ranks:
        firsts = np.cumsum(widths) - widths
        return np.where(firsts + widths <= num_ranks, firsts, -1)
    firsts = np.full(len(widths), -1, dtype=np.int64)
    open_nodes: list[list[int]] = [[] for _ in range(node + 1)]  # first free rank of nodes, by the number of free ranks
    start = 0  # all ranks from here on are free
    for number, width in enumerate(widths.tolist()):
        room = next((room for room in range(width, node + 1) if open_nodes[room]), 0)
        if not room and start + width > num_ranks:
            continue
        if room:
            first = open_nodes[room].pop()
        else:  # whole unused nodes; the last node of the span may be incomplete
            first, stop = start, min(-(-(start + width) // node) * node, num_ranks)
            room, start = stop - start, stop
        firsts[number] = first
        if room > width:
            open_nodes[room - width].append(first + width)
    return firsts
