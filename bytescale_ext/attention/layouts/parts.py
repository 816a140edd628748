"""Layouts of groups of documents that begin with equal tokens, which are computed once for the group.

A plan places such a group as one sequence: the shared tokens, then the rest of each document. Its *parts* are the
lengths of these pieces. Each part attends to itself, and every part after the first to the whole first part::

    keys             shared   rest 0   rest 1   rest 2
    shared           tri
    rest 0           all      tri
    rest 1           all               tri
    rest 2           all                        tri

Rows are the rows of the whole sequence, on one rank, in slices or in a ring. The first part is always computed before
the others, so its keys are there: on the rank, in an earlier slice, or at the hop that brings them. In a ring a part is
in the same zigzag shares as the sequence, so a part may have rows on a few members only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from bytescale_ext.attention.layouts.blocks import Interval, PlacedBlock, share_values
from bytescale_ext.attention.layouts.layout import AttentionLayout, RingPass
from bytescale_ext.attention.layouts.rows import CuSeqlens
from bytescale_ext.plan.step.micro_batch import Shard, uneven_ranges

type Parts = Mapping[int, Sequence[int]]
"""Lengths of the parts of each sequence that is a group; other sequences are missing."""


def with_parts(layout: AttentionLayout, shards: Sequence[Shard], key_end: int, parts: Parts) -> AttentionLayout:
    """Return a layout in which the parts of groups attend to themselves and to the first part. Pure.

    Args:
        layout: layout of a whole micro-batch, or of a slice without groups in rings; no windows.
        shards: shards of the micro-batch or slice, in memory order.
        key_end: row after the last own key of the micro-batch or slice, among the keys of the micro-batch.
        parts: lengths of the parts of groups.
    """
    local = [shard for shard in shards if len(shard.ring) == 1]
    if any(shard.seq in parts for shard in local):
        layout = _with_local_parts(layout, local, key_end, parts)
    passes = tuple(_with_pass_parts(one, parts) if set(one.seqs) & parts.keys() else one for one in layout.passes)
    return replace(layout, passes=passes)


def bounds_of(parts: Parts, seq: int, length: int) -> list[Interval]:
    """Return the tokens [start, stop) of each part of a sequence; ``length``: at least the end of its last part."""
    return list(pairwise(accumulate(parts[seq], initial=0))) if seq in parts else [(0, length)]


def _with_local_parts(layout: AttentionLayout, local: Sequence[Shard], key_end: int, parts: Parts) -> AttentionLayout:
    """Return a layout with blocks of the parts of local sequences; arguments as of ``with_parts``."""
    row, key = layout.local_start, key_end - layout.local.num_tokens
    rows: list[Interval] = []
    prefixes: list[Interval] = []
    queries: list[Interval] = []
    keys: list[Interval] = []
    for shard in local:
        ((first, last),) = shard.ranges
        bounds = bounds_of(parts, shard.seq, last)
        for start, stop in _inside(bounds, first, last):
            begin = next(begin for begin, end in bounds if begin <= start < end)
            rows.append((row + start - first, row + stop - first))
            prefixes.append((key + begin - first, key + start - first))
        shared = bounds[0][1]
        if len(bounds) > 1 and last > shared:
            queries.append((row + max(shared - first, 0), row + last - first))
            keys.append((key - first, key + shared - first))
        row, key = row + last - first, key + last - first
    prefix, shared_block = PlacedBlock.of(rows, prefixes), PlacedBlock.of(queries, keys)
    return replace(
        layout,
        local=CuSeqlens.of_lengths([stop - start for start, stop in rows]),
        local_prefix=None if prefix.is_empty else prefix,
        local_shared=None if shared_block.is_empty else shared_block,
    )


@dataclass(frozen=True)
class _Share:
    """Rows of a member's share of a sequence.

    Attributes:
        ranges: token ranges of the member.
        first: row of its first token among the member's rows of the pass.
    """

    ranges: tuple[Interval, ...]
    first: int

    def rows(self, start: int, stop: int) -> Interval:
        """Return the rows of the member's tokens in [start, stop), which are one interval."""
        return self.first + self._before(start), self.first + self._before(stop)

    @property
    def front(self) -> int:
        """Row after the front part."""
        return self.first + (self.num_rows + 1) // 2

    @property
    def num_rows(self) -> int:
        return sum(stop - start for start, stop in self.ranges)

    def _before(self, token: int) -> int:
        return sum(min(max(token - start, 0), stop - start) for start, stop in self.ranges)


def _with_pass_parts(ring_pass: RingPass, parts: Parts) -> RingPass:
    """Return a ring pass without slices with blocks of the parts of its sequences."""
    assert not ring_pass.prefix_blocks, "groups in rings have no slices"
    shares = [_shares(ring_pass, member) for member in range(ring_pass.width)]
    lengths = [sum(share[number] for share in ring_pass.shares) for number in range(len(ring_pass.seqs))]
    bounds = [bounds_of(parts, seq, length) for seq, length in zip(ring_pass.seqs, lengths, strict=True)]
    sources = [ring_pass.source(hop) for hop in range(ring_pass.width)]
    mine = shares[ring_pass.index]
    blocks = [_own_block(mine, shares[one], bounds, ring_pass.index, one) for one in sources]
    shared = [_shared_block(mine, shares[one], bounds, one) for one in sources]
    return replace(ring_pass, blocks=share_values(blocks), prefix_blocks=share_values(shared))


def _shares(ring_pass: RingPass, member: int) -> list[_Share]:
    """Return a member's share of each sequence of a pass."""
    firsts = accumulate(ring_pass.shares[member], initial=0)
    of_seqs = zip(*ring_pass.shares, strict=True)
    return [_Share(uneven_ranges(shares, member), first) for shares, first in zip(of_seqs, firsts, strict=False)]


def _own_block(
    mine: Sequence[_Share], theirs: Sequence[_Share], bounds: Sequence[Sequence[Interval]], index: int, source: int
) -> PlacedBlock:
    """Return the block of each part with its own keys; see ``layout.py`` for the zigzag.

    Args:
        mine, theirs: shares of this member, and of the member with the keys, of each sequence.
        bounds: tokens of the parts of each sequence.
        index, source: indices of the two members.
    """
    queries: list[Interval] = []
    keys: list[Interval] = []
    for own, other, of_seq in zip(mine, theirs, bounds, strict=True):
        for start, stop in of_seq:
            (q_first, q_end), (k_first, k_end) = own.rows(start, stop), other.rows(start, stop)
            if source > index:
                q_first = min(max(q_first, own.front), q_end)
            elif source < index:
                k_end = max(min(k_end, other.front), k_first)
            queries.append((q_first, q_end))
            keys.append((k_first, k_end))
    return PlacedBlock.of(queries, keys, causal=source == index, source=source)


def _shared_block(
    mine: Sequence[_Share], theirs: Sequence[_Share], bounds: Sequence[Sequence[Interval]], source: int
) -> PlacedBlock:
    """Return the block of all later parts with the keys of the first part; arguments as of ``_own_block``."""
    groups = [row for row in zip(mine, theirs, bounds, strict=True) if len(row[2]) > 1]
    queries = [own.rows(of_seq[0][1], of_seq[-1][1]) for own, _, of_seq in groups]
    keys = [other.rows(*of_seq[0]) for _, other, of_seq in groups]
    return PlacedBlock.of(queries, keys, source=source)


def _inside(bounds: Iterable[Interval], first: int, last: int) -> list[Interval]:
    """Return the non-empty intersections of intervals with [first, last)."""
    found = ((max(start, first), min(stop, last)) for start, stop in bounds)
    return [(start, stop) for start, stop in found if start < stop]
