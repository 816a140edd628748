"""The shelves of each layout, in slots: which rings stand side by side, and which shelf comes when."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bytescale_ext.plan.hdp.aligned.layouts import Layout
from bytescale_ext.plan.hdp.aligned.shelves import Region, RegionCut, RingWork, cut_regions, fill_shelves
from bytescale_ext.plan.hdp.aligned.step import AlignedStep

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class FilledRegion:
    """A region with what its rings take.

    Attributes:
        region: see ``Region``.
        tokens: of each ring on each of its ranks: [rings].
        slice_seconds: of the slices of each ring on each of its ranks, forward and backward: [2, rings, k].
        seconds: of all slices of each ring: [rings].
        heights: seconds of the longest ring of each shelf: [shelves].
    """

    region: Region
    tokens: Ints
    slice_seconds: Floats
    seconds: Floats
    heights: Floats

    @classmethod
    def of(cls, step: AlignedStep, region: Region) -> FilledRegion:
        """Return what the rings of a region of a step take."""
        lengths = step.lengths[region.rings]
        slice_seconds = step.ring_seconds(lengths, region.widths)
        seconds = slice_seconds.sum(axis=(0, 2))
        begins = np.cumsum(region.counts) - region.counts
        heights = np.maximum.reduceat(seconds, begins) if len(begins) else seconds
        return cls(region, -(-lengths // region.widths), slice_seconds, seconds, heights)

    def places(self, before: float) -> Ints:
        """Return the place of each shelf: ``before`` of them rise to the tallest, the others fall: [shelves]."""
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
    """The shelves of one layout.

    Attributes:
        layout: the layout.
        num_rings: the first ``num_rings`` sequences are rings.
        regions: its regions.
        front: slots before the first shelf.
        slots: the slot of each shelf of each region: [shelves] each.
    """

    layout: Layout
    num_rings: int
    regions: tuple[FilledRegion, ...]
    front: int
    slots: tuple[Ints, ...]

    @property
    def key(self) -> tuple[object, ...]:
        """What the plan is made from: two layouts with the same key make the same plan."""
        layout = self.num_rings, self.front, self.layout.pack, self.layout.peak
        return (*layout, *(one.region.key for one in self.regions), *(slots.tobytes() for slots in self.slots))


class Shelver:
    """Shelves the rings of a step in one layout after another. Many layouts have the same regions, filled once."""

    def __init__(self, step: AlignedStep) -> None:
        self._step = step
        self._filled: dict[tuple[object, ...], FilledRegion] = {}

    def __call__(self, layout: Layout) -> Shelving:
        """Cut regions, put their rings on shelves, and give the shelves their slots."""
        step = self._step
        front = round(layout.front * (1 + step.fill)) if step.num_stages > 1 else 0
        regions, num_rings = self._regions(layout)
        slots = tuple(front + one.places(layout.before) for one in regions)
        return Shelving(layout, num_rings, regions, front, slots)

    def _regions(self, layout: Layout) -> tuple[tuple[FilledRegion, ...], int]:
        """Return the regions of a layout, and how many sequences are rings."""
        step, problem, num_ranks = self._step, self._step.problem, self._step.num_ranks
        mean = float(step.seconds.sum()) / num_ranks
        height = max(layout.height * mean, 1e-300)
        most = np.minimum(step.hidden_widths * layout.spread, num_ranks).astype(np.int64)
        most = np.maximum(np.minimum(most, step.lengths), problem.min_widths)
        is_long = step.lengths > problem.tokens_per_rank
        num_rings = int((is_long | ((step.seconds > height) & (most > 1))).sum())
        rings = slice(0, num_rings)
        work = RingWork(
            step.lengths[rings], step.seconds[rings], problem.min_widths[rings], most[rings], problem.cluster
        )
        cuts = cut_regions(work, height, layout.budget * mean, layout.peak * step.fill, layout.num_regions)
        return tuple(self._region(work, cut, height) for cut in cuts), num_rings

    def _region(self, work: RingWork, cut: RegionCut, height: float) -> FilledRegion:
        """Fill a region, if no layout before had the same one: its rings, their height and the most ranks of each."""
        key = (cut, height, work.max_widths[cut.begin : cut.end].tobytes())
        if key not in self._filled:
            self._filled[key] = FilledRegion.of(self._step, fill_shelves(work, cut, height))
        return self._filled[key]
