"""The way of keys round a ring, in its two forms.

In a *plain* ring keys make D-1 hops, up over every second rank and back over the others::

    ring of 7 contiguous ranks    0 -> 2 -> 4 -> 6 -> 5 -> 3 -> 1 -> 0

so a rank exchanges only with ranks at most two places away, whatever the width of the ring: at most four peers in a
whole training run. This matters because NCCL keeps buffers for each peer.

Between nodes a plain ring uses one link in each direction. A *hierarchical* ring consists of inner rings of equally
many contiguous ranks, each inside a node. In each *round* keys visit the members of an inner ring; during a round each
member also sends the keys that it held when the round began to its counterpart in the next inner ring, so that all
links between nodes work at once. Two inner rings of 4 ranks, what rank 0 holds::

    round            0                  1
    step             0   1   2   3      4   5   6   7
    keys of rank     0   1   3   2      4   5   7   6
    on the way       keys of rank 4     -

Inner rings of one size are the same everywhere, so the counterparts of a rank are at most four more peers. Sources:
LoongTrain (Gu et al. 2024), "double ring attention"; ByteScale section 5.1 for the plain ring.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True, slots=True)
class Route:
    """The way of keys round a ring, as one member sees it.

    Attributes:
        ring: HDP ranks in ring order.
        index: my place in ``ring``.
        inner_rings: of how many inner rings the ring consists; 1: a plain ring.
    """

    ring: tuple[int, ...]
    index: int
    inner_rings: int = 1

    @property
    def width(self) -> int:
        return len(self.ring)

    @property
    def inner_width(self) -> int:
        """Members of an inner ring, and steps of a round."""
        return len(self.ring) // self.inner_rings

    def source(self, step: int) -> int:
        """Return the place in ``ring`` of the member whose keys are here at a step; after D steps mine are back."""
        inner = self.inner_width
        number, hop = divmod(step % self.width, inner)
        group, place = divmod(self.index, inner)
        return _back(self.inner_rings, group, number) * inner + _back(inner, place, hop)

    @property
    def next_rank(self) -> int:
        """The HDP rank of my inner ring to which I send."""
        return self.ring[self._beside(-1)]

    @property
    def previous_rank(self) -> int:
        """The HDP rank of my inner ring from which I receive."""
        return self.ring[self._beside(1)]

    @property
    def next_counterpart(self) -> int:
        """The HDP rank of the next inner ring to which I send."""
        return self.ring[self.source(-self.inner_width)]

    @property
    def previous_counterpart(self) -> int:
        """The HDP rank of the previous inner ring from which I receive."""
        return self.ring[self.source(self.inner_width)]

    def _beside(self, hops: int) -> int:
        """Return the place in ``ring`` so many hops before me in my inner ring."""
        group, place = divmod(self.index, self.inner_width)
        return group * self.inner_width + _back(self.inner_width, place, hops)


@cache
def folded_route(width: int) -> tuple[int, ...]:
    """Return the places of a ring in the order in which keys travel: 0, 2, 4, ... and back over the odd ones to 1."""
    return (*range(0, width, 2), *reversed(range(1, width, 2)))


def _back(width: int, place: int, hops: int) -> int:
    """Return the place from which keys come in so many hops, in a ring of ``width`` places."""
    route = folded_route(width)
    return route[(route.index(place) - hops) % width]
