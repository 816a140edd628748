"""Shelving: the shelves of each arrangement, and their slots."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bytescale_ext.plan.hdp.aligned.arrangements import Arrangement
from bytescale_ext.plan.hdp.aligned.pools import Pool, pools_of
from bytescale_ext.plan.hdp.aligned.shelves import EmptySpan, RankSpan, RingWork, fill_shelves, split_ranks
from bytescale_ext.plan.hdp.aligned.step import AlignedStep

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class TimedSpan:
    """A rank span with the times of its rings.

    Attributes:
        span: ranks and shelves.
        tokens: tokens of each ring on each of its ranks: [rings].
        slice_seconds: seconds of each slice of each ring on each rank, forward and backward: [2, rings, k].
        seconds: seconds of all slices of each ring on each rank: [rings].
        heights: seconds of the slowest ring of each shelf: [shelves].
    """

    span: RankSpan
    tokens: Ints
    slice_seconds: Floats
    seconds: Floats
    heights: Floats

    @classmethod
    def of(cls, step: AlignedStep, span: RankSpan) -> TimedSpan:
        """Return a span with the times of its rings."""
        lengths = step.lengths[span.rings]
        slice_seconds = step.ring_seconds(lengths, span.widths)
        seconds = slice_seconds.sum(axis=(0, 2))
        begins = np.cumsum(span.counts) - span.counts
        heights = np.maximum.reduceat(seconds, begins) if len(begins) else seconds
        return cls(span, -(-lengths // span.widths), slice_seconds, seconds, heights)

    def shelf_order(self, before: float) -> Ints:
        """Return the position of each shelf in running order: [shelves].

        A share ``before`` of the shelves rises to the tallest shelf, and the others fall after it.
        """
        rising: list[int] = []
        falling: list[int] = []
        for number in np.argsort(-self.heights, kind="stable").tolist():
            is_rising = len(rising) < before * len(rising + falling)
            (rising if is_rising and falling else falling).append(number)
        places = np.empty(len(self.heights), dtype=np.int64)
        places[rising[::-1] + falling] = np.arange(len(places))
        return places


@dataclass(frozen=True, eq=False)
class Shelving:
    """An arrangement with its rings on shelves and its shelves in slots.

    Attributes:
        arrangement: the arrangement.
        num_rings: number of rings, which are the first sequences of the step.
        spans: rank spans.
        front: slots before the first shelf.
        slots: slot of each shelf, for each span: [shelves] each.
    """

    arrangement: Arrangement
    num_rings: int
    spans: tuple[TimedSpan, ...]
    front: int
    slots: tuple[Ints, ...]

    @property
    def key(self) -> tuple[object, ...]:
        """Everything that a plan depends on: shelvings with equal keys have equal plans."""
        numbers = self.num_rings, self.front, self.arrangement.pack, self.arrangement.peak
        return (*numbers, *(timed.span.key for timed in self.spans), *(slots.tobytes() for slots in self.slots))


class Shelver:
    """Puts the rings of one step on shelves, for many arrangements. Spans that several arrangements share are kept."""

    def __init__(self, step: AlignedStep) -> None:
        self._step = step
        self._cache: dict[tuple[object, ...], TimedSpan] = {}

    def __call__(self, arrangement: Arrangement) -> Shelving:
        """Split the ranks into spans, put their rings on shelves, and give the shelves their slots."""
        step = self._step
        front = round(arrangement.front * (1 + step.ramp_slots)) if step.num_stages > 1 else 0
        spans, num_rings = self._spans(arrangement)
        slots = tuple(front + timed.shelf_order(arrangement.before) for timed in spans)
        return Shelving(arrangement, num_rings, spans, front, slots)

    def _spans(self, arrangement: Arrangement) -> tuple[tuple[TimedSpan, ...], int]:
        """Return the spans of an arrangement, and the number of rings."""
        step, problem, num_ranks = self._step, self._step.problem, self._step.num_ranks
        mean = float(step.seconds.sum()) / float(problem.cluster.rank_speeds().sum())
        height = max(arrangement.height * mean, 1e-300)
        max_widths = np.minimum(step.hidden_widths * arrangement.spread, num_ranks).astype(np.int64)
        max_widths = np.maximum(np.minimum(max_widths, step.lengths), problem.min_widths)
        is_long = step.lengths > problem.tokens_per_rank
        num_rings = int((is_long | ((step.seconds > height) & (max_widths > 1))).sum())
        rings = slice(0, num_rings)
        work = RingWork(
            step.lengths[rings], step.seconds[rings], problem.min_widths[rings], max_widths[rings], problem.cluster
        )
        budget, peak = arrangement.budget * mean, arrangement.peak * step.ramp_slots
        pools: tuple[Pool, ...] = (Pool(EmptySpan(0, num_ranks, 0, num_rings)),)
        if arrangement.pools is not None:
            pools = pools_of(work, arrangement.pools)
        spans = [
            (span, height * pool.speed)
            for pool in pools
            for span in split_ranks(
                work, pool.span, height * pool.speed, budget * pool.speed, peak, arrangement.max_spans
            )
        ]
        return tuple(self._timed_span(work, *span) for span in spans), num_rings

    def _timed_span(self, work: RingWork, span: EmptySpan, height: float) -> TimedSpan:
        """Return a span with its shelves filled, from the cache if an arrangement before had the same rings in it."""
        key = (span, height, work.max_widths[span.begin : span.end].tobytes())
        if key not in self._cache:
            self._cache[key] = TimedSpan.of(self._step, fill_shelves(work, span, height))
        return self._cache[key]
