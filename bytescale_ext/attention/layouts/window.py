"""Layouts of ring sequences that a window limits.

A token sees its own key and at most ``window`` keys before it. So a rank needs few keys of other ranks: the keys of the
``window`` tokens before each of its runs of tokens (front and back). They arrive in one exchange, and nothing travels
round the ring. All keys that a rank needs are in its *pool*, in the order of their tokens. Each run is a causal block
at the end of its keys. For the member with the tokens 4-7 and 24-27 of 32, with a window of 6::

    queries          4 .. 7                  24 .. 27
    keys         0 .. 7               18 .. 27
    pool         0 1 2 3 4 5 6 7 18 19 20 21 22 23 24 25 26 27
    from others  0 1 2 3         18 19 20 21 22 23

In a slice of a micro-batch, the keys before a run may belong to earlier slices. Each member keeps only its own keys of
these slices, and sends them again as far back as the window reaches.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

from bytescale_ext.attention.layouts.blocks import Interval, PlacedBlock, share_values
from bytescale_ext.attention.layouts.route import Route
from bytescale_ext.attention.layouts.rows import Rows
from bytescale_ext.plan.step.micro_batch import zigzag_ranges


@dataclass(frozen=True, slots=True)
class WindowPass:
    """A rank's rows and blocks of the sequences of a ring that a window limits.

    The *sent* keys are this rank's keys that any member needs, including this rank itself.

    Attributes:
        seqs: indices of the sequences in the plan's lengths, ascending.
        in_micro_batch: rows of this rank's queries in the micro-batch or slice.
        keys: rows of the sent keys among the keys of the micro-batch.
        num_keys: number of keys in the pool.
        own: rows of this rank's needed keys among the sent keys, and their rows in the pool.
        sends: rank of each other member that needs sent keys, and their rows among the sent keys.
        receives: rank of each other member with keys for the pool, and their rows in the pool.
        blocks: block of the first run of each sequence, then block of the second runs, over the pool.
    """

    seqs: tuple[int, ...]
    in_micro_batch: Rows
    keys: Rows
    num_keys: int
    own: tuple[Rows, Rows]
    sends: tuple[tuple[int, Rows], ...]
    receives: tuple[tuple[int, Rows], ...]
    blocks: tuple[PlacedBlock, ...]


@dataclass(frozen=True, slots=True)
class WindowSequence:
    """A ring sequence up to the end of a slice.

    Attributes:
        seq: index of the sequence in the plan's lengths.
        ends: end of each slice, in tokens of the sequence; the tokens of the last slice are the queries.
        first_key: first row of this rank's keys of the sequence among the keys of the micro-batch.
    """

    seq: int
    ends: tuple[int, ...]
    first_key: int

    def runs(self, width: int, member: int) -> list[Interval]:
        """Return the tokens of a member of a ring of ``width`` ranks in all slices, ascending."""
        return [run for index in range(len(self.ends)) for run in self.own_runs(width, member, index)]

    def own_runs(self, width: int, member: int, index: int = -1) -> list[Interval]:
        """Return the tokens of a member in one slice, by default the last slice: at most two runs."""
        index %= len(self.ends)
        start = self.ends[index - 1] if index else 0
        return [(start + a, start + b) for a, b in zigzag_ranges(self.ends[index] - start, width, member)]


def is_limited(length: int, window: int | None) -> bool:
    """Return whether a window is shorter than a sequence, so that some tokens do not see all earlier keys."""
    return window is not None and length > window + 1


def window_pass(sequences: Sequence[WindowSequence], route: Route, in_micro_batch: Rows, window: int) -> WindowPass:
    """Return the window pass of one member of a ring. Pure; no communication.

    Args:
        sequences: sequences that the ring shares, ascending.
        route: ring and member; keys go straight to the members that need them.
        in_micro_batch: rows of the member's queries.
        window: the most keys before its own key that a query sees.
    """
    ring, index = route.ring, route.index
    members = range(len(ring))
    # Tokens that each member needs and owns, by sequence.
    needed = [[_needed(seq.own_runs(len(ring), member), window) for member in members] for seq in sequences]
    owned = [[seq.runs(len(ring), member) for member in members] for seq in sequences]
    pool = [_Line(needs[index]) for needs in needed]
    keys = [_Line(runs[index], seq.first_key) for runs, seq in zip(owned, sequences, strict=True)]
    first_pool_rows = list(accumulate((line.num_tokens for line in pool), initial=0))
    pool = [_Line(line.runs, first) for line, first in zip(pool, first_pool_rows, strict=False)]

    def transferred(receiver: int, owner: int, lines: Sequence[_Line]) -> Rows:
        """Return the rows, on ``lines``, of the keys that ``receiver`` needs and ``owner`` owns."""
        common = (_common(needs[receiver], runs[owner]) for needs, runs in zip(needed, owned, strict=True))
        return Rows.of(chain.from_iterable(line.rows(runs) for line, runs in zip(lines, common, strict=True)))

    requested = {member: transferred(member, index, keys) for member in members}
    sent = _union(chain.from_iterable(rows.intervals for rows in requested.values()))
    sent_line = _Line(sent)
    rows_in_sent = {member: Rows.of(sent_line.rows(rows.intervals)) for member, rows in requested.items()}
    others = [member for member in members if member != index]
    receives = {member: transferred(index, member, pool) for member in others}
    return WindowPass(
        seqs=tuple(seq.seq for seq in sequences),
        in_micro_batch=in_micro_batch,
        keys=Rows.of(sent),
        num_keys=first_pool_rows[-1],
        own=(rows_in_sent[index], transferred(index, index, pool)),
        sends=tuple((ring[member], rows_in_sent[member]) for member in others if rows_in_sent[member].num_rows),
        receives=tuple((ring[member], rows) for member, rows in receives.items() if rows.num_rows),
        blocks=_blocks([seq.own_runs(len(ring), index) for seq in sequences], pool, window),
    )


def _blocks(runs: Sequence[list[Interval]], pool: Sequence[_Line], window: int) -> tuple[PlacedBlock, ...]:
    """Return the block of the first runs of all sequences and the block of their second runs, if they are not empty.

    ``runs``: tokens of the queries of each sequence; ``pool``: line of each sequence's keys.
    """
    queries: tuple[list[Interval], list[Interval]] = ([], [])
    keys: tuple[list[Interval], list[Interval]] = ([], [])
    row = 0
    for line, sequence_runs in zip(pool, runs, strict=True):
        for number, (start, stop) in enumerate(sequence_runs):
            queries[number].append((row, row + stop - start))
            keys[number].extend(line.rows([(max(0, start - window), stop)]))
            row += stop - start
    blocks = (PlacedBlock.in_window(*intervals, window) for intervals in zip(queries, keys, strict=True))
    return share_values([block for block in blocks if not block.is_empty])


class _Line:
    """Ascending runs of tokens (or rows), laid end to end from row ``first`` on."""

    def __init__(self, runs: Sequence[Interval], first: int = 0) -> None:
        self.runs = runs
        self._begins = list(accumulate((stop - start for start, stop in runs), initial=first))

    @property
    def num_tokens(self) -> int:
        return self._begins[-1] - self._begins[0]

    def rows(self, parts: Iterable[Interval]) -> list[Interval]:
        """Return the rows of parts of the tokens. Each part must be inside a run."""
        rows = []
        for start, stop in parts:
            begins = zip(self.runs, self._begins, strict=False)
            row = next(begin + start - a for (a, b), begin in begins if a <= start and stop <= b)
            rows.append((row, row + stop - start))
        return rows


def _needed(runs: Sequence[Interval], window: int) -> list[Interval]:
    """Return the tokens with keys that the queries of ``runs`` see."""
    return _union((max(0, start - window), stop) for start, stop in runs)


def _union(parts: Iterable[Interval]) -> list[Interval]:
    """Return the union of intervals: ascending, disjoint and not adjacent."""
    joined: list[Interval] = []
    for start, stop in sorted(parts):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
    return joined


def _common(some: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """Return the intersection of two lists of intervals, ascending. Adjacent intervals of ``others`` stay separate."""
    overlaps = [(max(a, c), min(b, d)) for a, b in some for c, d in others]
    return sorted((start, stop) for start, stop in overlaps if start < stop)
