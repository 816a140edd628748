"""Micro-batches of shards: the input of one forward pass of one rank.

A sequence on D ranks is cut into 2D parts; the i-th rank of its ring holds parts i and 2D-1-i, so that every rank holds
the same share of the causal triangle (ByteScale section 7, Fig. 14). For D = 3::

    token   0                                            s
    part    |  0   |  1   |  2   |  3   |  4   |  5   |
    rank      r0     r1     r2     r2     r1     r0

In a ring of ranks of unlike speeds, a rank's two parts may be longer or shorter than the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Shard:
    """The tokens of one sequence on one rank.

    Attributes:
        seq: index of the sequence in ``StepPlan.lengths``.
        ranges: token ranges ``(start, stop)`` of the sequence, ascending, none empty.
        ring: HDP ranks that share the sequence, in ring order; ``(rank,)`` for a local sequence.
        inner_rings: number of inner rings of contiguous ranks in a hierarchical ring; 1 for a plain ring.
        shares: tokens of each member of an uneven ring, in ring order; empty if all shares are about equal.
    """

    seq: int
    ranges: tuple[tuple[int, int], ...]
    ring: tuple[int, ...]
    inner_rings: int = 1
    shares: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(stop - start for start, stop in self.ranges)

    def member_ranges(self, length: int, member: int) -> tuple[tuple[int, int], ...]:
        """Return the token ranges of a member of the shard's ring. ``length``: tokens of the sequence."""
        return uneven_ranges(self.shares, member) if self.shares else zigzag_ranges(length, len(self.ring), member)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The input of one forward pass of one rank: shards laid end to end.

    Shards of rings come first, in the order of their ``seq``, then local sequences.

    Attributes:
        shards: shards in memory order; none only in aligned slots, for a micro-batch of padding.
        offload: share of the activations that stays in host memory until the backward pass, 0 to 1 (ByteScale section
            5.2, offload ratio).
    """

    shards: tuple[Shard, ...]
    offload: float = 0.0

    @property
    def num_tokens(self) -> int:
        return sum(shard.num_tokens for shard in self.shards)


def zigzag_ranges(length: int, width: int, member: int) -> tuple[tuple[int, int], ...]:
    """Return the token ranges of ring member ``member`` of a sequence of ``length`` tokens on ``width`` ranks.

    There is no padding: shares differ by at most one token, and none exceeds ``ceil(length / width)``. A share of n
    tokens has a front part of ``ceil(n / 2)`` and a back part of ``floor(n / 2)`` tokens. A sequence on one rank is one
    range. Empty ranges are left out.
    """
    if width == 1:
        return ((0, length),) if length else ()
    first, front, back, last = _zigzag(length, width, member)
    return tuple((start, stop) for start, stop in ((first, front), (back, last)) if stop > start)


def uneven_ranges(shares: Sequence[int], member: int) -> tuple[tuple[int, int], ...]:
    """Return the token ranges of a ring member if members have these shares: the zigzag of ``zigzag_ranges``.

    ``shares``: tokens of each member, at least 1.
    """
    before, own = shares[:member], shares[member]
    first, last = sum((share + 1) // 2 for share in before), sum(shares) - sum(share // 2 for share in before)
    parts = ((first, first + (own + 1) // 2), (last - own // 2, last))
    return tuple((start, stop) for start, stop in parts if stop > start)


def zigzag_bounds(lengths: Ints, widths: Ints, members: Ints) -> Ints:
    """Return ``zigzag_ranges`` of many shards, empty ranges included: [n, 2 ranges, (start, stop)].

    ``lengths``, ``widths``, ``members``: tokens and ranks of each sequence, and the shard's ring member: [n].
    """
    first, front, back, last = _zigzag(lengths, widths, members)
    local = widths == 1
    front, back, last = np.where(local, lengths, front), np.where(local, 0, back), np.where(local, 0, last)
    return np.stack((first, front, back, last), axis=1).reshape(-1, 2, 2)


def _zigzag[T: (int, Ints)](length: T, width: T, member: T) -> tuple[T, T, T, T]:
    """Return start and stop of the front part of a ring member, then of its back part: numbers, or arrays [n]."""
    base, extra = length // width, length % width

    def before(position: T, odd: int) -> T:
        """Return the tokens of the front parts (odd=1, rounded up) or back parts (odd=0) of members [0, position)."""
        larger = position - (position > extra) * (position - extra)
        return larger * ((base + 1 + odd) // 2) + (position - larger) * ((base + odd) // 2)

    return before(member, 1), before(member + 1, 1), length - before(member + 1, 0), length - before(member, 0)
