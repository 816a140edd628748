"""Routes of keys round a ring: plain and hierarchical.

In a *plain* ring keys make D-1 hops, up over every second rank and back over the others::

    ring of 7 contiguous ranks    0 -> 2 -> 4 -> 6 -> 5 -> 3 -> 1 -> 0

So a rank exchanges only with ranks at most two places away, whatever the width of the ring. These are at most four
peers in a whole training run, which matters because NCCL keeps buffers per peer.

Between nodes a plain ring uses one link in each direction. A *hierarchical* ring consists of inner rings of the same
number of contiguous ranks, each inside a node. In each *round* keys visit the members of an inner ring. During the
round each member also sends the keys that it had at the start of the round to its counterpart in the next inner ring,
so that all links between nodes work at the same time. With two inner rings of 4 ranks, rank 0 has these keys::

    round            0                  1
    hop              0   1   2   3      4   5   6   7
    keys of rank     0   1   3   2      4   5   7   6
    in transit       keys of rank 4     -

Inner rings of one size are the same in all rings, so the counterparts of a rank are at most four more peers. Sources:
LoongTrain (Gu et al. 2024), "double ring attention"; ByteScale section 5.1 for the plain ring.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True, slots=True)
class Route:
    """The route of keys round a ring, from the point of view of one member.

    Attributes:
        ring: HDP ranks in ring order.
        index: index of this member in ``ring``.
        inner_rings: number of inner rings; 1 for a plain ring.
    """

    ring: tuple[int, ...]
    index: int
    inner_rings: int = 1

    @property
    def width(self) -> int:
        return len(self.ring)

    @property
    def inner_width(self) -> int:
        """Number of members of an inner ring, and of hops of a round."""
        return len(self.ring) // self.inner_rings

    def source(self, hop: int) -> int:
        """Return the index in ``ring`` of the member whose keys are here at a hop. The route repeats after D hops."""
        inner = self.inner_width
        round_number, inner_hop = divmod(hop % self.width, inner)
        inner_ring, place = divmod(self.index, inner)
        return _upstream(self.inner_rings, inner_ring, round_number) * inner + _upstream(inner, place, inner_hop)

    @property
    def next_rank(self) -> int:
        """The HDP rank of the successor in the inner ring."""
        return self.ring[self._in_inner_ring(-1)]

    @property
    def previous_rank(self) -> int:
        """The HDP rank of the predecessor in the inner ring."""
        return self.ring[self._in_inner_ring(1)]

    @property
    def next_counterpart(self) -> int:
        """The HDP rank of the counterpart in the next inner ring."""
        return self.ring[self.source(-self.inner_width)]

    @property
    def previous_counterpart(self) -> int:
        """The HDP rank of the counterpart in the previous inner ring."""
        return self.ring[self.source(self.inner_width)]

    def _in_inner_ring(self, hops: int) -> int:
        """Return the index in ``ring`` of the member ``hops`` hops upstream in the inner ring."""
        inner_ring, place = divmod(self.index, self.inner_width)
        return inner_ring * self.inner_width + _upstream(self.inner_width, place, hops)


@cache
def folded_route(width: int) -> tuple[int, ...]:
    """Return the places of a ring in the order of travel: even places ascending, then odd places descending."""
    return (*range(0, width, 2), *reversed(range(1, width, 2)))


def _upstream(width: int, place: int, hops: int) -> int:
    """Return the place ``hops`` hops upstream of ``place`` in a ring of ``width`` places."""
    route = folded_route(width)
    return route[(route.index(place) - hops) % width]
