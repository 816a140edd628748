"""The layouts of aligned plans that the search tries."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Layout:
    """One way to lay out a step.

    Attributes:
        num_regions: the most regions.
        height: of a shelf, as a share of the mean work of a rank.
        before: share of the shelves that come before the tallest.
        front: slots of short sequences before the first shelf, as a share of the stages.
        pack: tokens of a short micro-batch, as a share of C.
        peak: how often the tallest slot counts again, as a share of the stages that fill and drain.
        budget: seconds of the ranks of a region, as a multiple of the mean work of a rank.
        spread: the most ranks of a ring, as a multiple of the ranks over which its exchange hides.
    """

    num_regions: int = 1
    height: float = 0.1
    before: float = 0.5
    front: float = 0.75
    pack: float = 0.25
    peak: float = 0.5
    budget: float = 1.2
    spread: float = 1.0

    def on(self, num_ranks: int) -> Layout:
        """Return the layout with defaults where so many ranks have no use for a value: one rank has no rings."""
        return self if num_ranks > 1 else Layout(front=self.front, pack=self.pack)


STARTS = (
    *(Layout(num_regions=regions, height=height) for regions in (1, 3) for height in (0.1, 0.03, 0.2)),
    Layout(6, height=0.05, front=1.0, pack=0.125, budget=1.0),
    Layout(6, height=0.2, before=0.35, front=1.0, pack=1.0, peak=0.9, budget=2.0, spread=1.5),
)
"""Layouts that are tried first: the set, out of some hundred, that did best on steps of 64 and 128 ranks."""

SLICED_STARTS = (
    Layout(2, height=0.3, before=0.35, front=0.25, pack=1.0, peak=0.9, budget=1.05, spread=3.0),
    Layout(6, height=0.4, before=0.65, pack=0.5, budget=1.0, peak=0.25, spread=3.0),
    Layout(1, height=0.4, before=0.35, front=0.5, peak=0.9, budget=2.0, spread=2.0),
    Layout(8, height=0.3, before=0.35, front=0.5, pack=1.0, peak=0.1, budget=0.9, spread=5.0),
    Layout(8, height=0.6, before=0.2, front=1.0, pack=1.0, peak=0.25, budget=0.95, spread=5.0),
    Layout(6, height=0.2, before=0.35, front=0.25, pack=1.0, peak=0.9, budget=0.9, spread=2.0),
    Layout(8, height=0.6, before=0.65, front=0.75, pack=1.0, peak=0.25, budget=0.8, spread=5.0),
    Layout(8, height=0.4, before=0.35, front=0.5, pack=0.5, peak=0.1, budget=0.95, spread=3.0),
    Layout(6, height=0.6, before=0.2, front=0.5, pack=1.0, peak=0.25, budget=1.0, spread=3.0),
    Layout(3, height=0.6, before=0.35, front=1.0, peak=0.1, budget=1.0, spread=3.0),
    Layout(6, height=0.05, front=1.0, budget=1.0),
)
"""The same with slices; the seeds of those steps are not the seeds of docs/results/simulated.md."""


def variations(layout: Layout) -> list[Layout]:
    """Return the layouts that are tried next: each has one other value than the best layout so far."""
    return [
        *(replace(layout, before=value) for value in (0.3, 0.2, 0.7)),
        *(replace(layout, front=value) for value in (1.0, 0.5)),
        *(replace(layout, num_regions=value) for value in (2, 4, 6, 8)),
        *(replace(layout, pack=value) for value in (0.5, 0.125, 1.0)),
        *(replace(layout, peak=value) for value in (0.9, 0.25)),
        *(replace(layout, height=value) for value in (0.03, 0.05, 0.1, 0.2, 0.4)),
        *(replace(layout, budget=value) for value in (1.0, 0.9, 0.8, 1.5, 2.0, 0.7)),
        *(replace(layout, spread=value) for value in (2.0, 1.4, 3.0, 5.0)),
    ]
