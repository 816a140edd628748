"""The arrangements that the search for an aligned plan tries."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Arrangement:
    """The parameters of one aligned plan of a step.

    Attributes:
        max_spans: largest number of rank spans.
        height: height of a shelf, as a share of a rank's mean work.
        before: share of a span's shelves that run before the tallest shelf.
        front: slots of short sequences before the first shelf, as a multiple of ``1 + ramp_slots``.
        pack: tokens of a micro-batch of short sequences, as a share of C.
        peak: share of the ramp slots that cost as much as a rank's tallest slot.
        budget: seconds of each rank of a span, as a multiple of a rank's mean work.
        spread: largest width of a ring, relative to the ranks over which its exchange overlaps with computation.
        pools: ranks of rings if ranks have unlike speeds: one of ``pools.POOLS``, or None for rings over all ranks.
    """

    max_spans: int = 1
    height: float = 0.1
    before: float = 0.5
    front: float = 0.75
    pack: float = 0.25
    peak: float = 0.5
    budget: float = 1.2
    spread: float = 1.0
    pools: str | None = None

    def for_ranks(self, num_ranks: int) -> Arrangement:
        """Return the arrangement with defaults for the parameters of rings if there is one rank only."""
        return self if num_ranks > 1 else Arrangement(front=self.front, pack=self.pack)


STARTS = (
    *(Arrangement(max_spans=spans, height=height) for spans in (1, 3) for height in (0.1, 0.03, 0.2)),
    Arrangement(6, height=0.05, front=1.0, pack=0.125, budget=1.0),
    Arrangement(6, height=0.2, before=0.35, front=1.0, pack=1.0, peak=0.9, budget=2.0, spread=1.5),
)
"""Arrangements to try first without slices: the best set out of some hundred, on steps of 64 and 128 ranks."""

SLICED_STARTS = (
    Arrangement(2, height=0.3, before=0.35, front=0.25, pack=1.0, peak=0.9, budget=1.05, spread=3.0),
    Arrangement(6, height=0.4, before=0.65, pack=0.5, budget=1.0, peak=0.25, spread=3.0),
    Arrangement(1, height=0.4, before=0.35, front=0.5, peak=0.9, budget=2.0, spread=2.0),
    Arrangement(8, height=0.3, before=0.35, front=0.5, pack=1.0, peak=0.1, budget=0.9, spread=5.0),
    Arrangement(8, height=0.6, before=0.2, front=1.0, pack=1.0, peak=0.25, budget=0.95, spread=5.0),
    Arrangement(6, height=0.2, before=0.35, front=0.25, pack=1.0, peak=0.9, budget=0.9, spread=2.0),
    Arrangement(8, height=0.6, before=0.65, front=0.75, pack=1.0, peak=0.25, budget=0.8, spread=5.0),
    Arrangement(8, height=0.4, before=0.35, front=0.5, pack=0.5, peak=0.1, budget=0.95, spread=3.0),
    Arrangement(6, height=0.6, before=0.2, front=0.5, pack=1.0, peak=0.25, budget=1.0, spread=3.0),
    Arrangement(3, height=0.6, before=0.35, front=1.0, peak=0.1, budget=1.0, spread=3.0),
    Arrangement(6, height=0.05, front=1.0, budget=1.0),
)
"""Arrangements to try first with slices, chosen on steps with other seeds than docs/results/simulated.md."""


def variations(arrangement: Arrangement) -> list[Arrangement]:
    """Return the arrangements to try next: each differs from ``arrangement`` in one parameter."""
    return [
        *(replace(arrangement, before=value) for value in (0.3, 0.2, 0.7)),
        *(replace(arrangement, front=value) for value in (1.0, 0.5)),
        *(replace(arrangement, max_spans=value) for value in (2, 4, 6, 8)),
        *(replace(arrangement, pack=value) for value in (0.5, 0.125, 1.0)),
        *(replace(arrangement, peak=value) for value in (0.9, 0.25)),
        *(replace(arrangement, height=value) for value in (0.03, 0.05, 0.1, 0.2, 0.4)),
        *(replace(arrangement, budget=value) for value in (1.0, 0.9, 0.8, 1.5, 2.0, 0.7)),
        *(replace(arrangement, spread=value) for value in (2.0, 1.4, 3.0, 5.0)),
    ]
