"""Which rows attend to which keys where a window limits a sequence of a ring.

A token sees its own key and at most ``window`` keys before it. So a rank needs few keys of others: of each of its runs
of tokens (front and back), the ``window`` tokens before it. They come in one exchange, and nothing travels round the
ring. All keys of a rank lie in its *pool*, in the order of their tokens, and each run is one causal block at the end of
its keys. For the member that holds the tokens 4-7 and 24-27 of 32, with a window of 6::

    queries          4 .. 7                  24 .. 27
    keys         0 .. 7               18 .. 27
    pool         0 1 2 3 4 5 6 7 18 19 20 21 22 23 24 25 26 27
    from others  0 1 2 3         18 19 20 21 22 23

In a slice of a micro-batch, the keys before a run may belong to earlier slices. Each member keeps its own keys of those
slices and sends them again, as far back as a window reaches; it keeps no keys of others.
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
    """My rows of sequences that one ring of ranks shares and a window limits.

    The *sent* rows are those of my keys that somebody needs, I myself included.

    Attributes:
        seqs: the sequences (indices into the plan's lengths), ascending.
        in_micro_batch: rows of my queries in the micro-batch, or in the slice.
        keys: rows of the sent keys among the keys of the micro-batch.
        num_keys: rows of the pool.
        own: my keys in the pool: rows among the sent ones, and rows of the pool.
        sends: for each other member that needs some: its rank, and their rows among the sent ones.
        receives: for each other member whose keys I need: its rank, and their rows in the pool.
        blocks: the first run of each sequence, then the second one, against the pool.
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
    """A sequence of a ring, up to the end of a slice.

    Attributes:
        seq: index into the plan's lengths.
        ends: the token at which each slice ends, up to this slice, whose tokens are the queries.
        first_key: the first row of my keys of the sequence among the keys of the micro-batch.
    """

    seq: int
    ends: tuple[int, ...]
    first_key: int

    def runs(self, width: int, member: int) -> list[Interval]:
        """Return the tokens of a member of a ring of ``width`` ranks, ascending; the slice's own come last."""
        return [run for index in range(len(self.ends)) for run in self.own_runs(width, member, index)]

    def own_runs(self, width: int, member: int, index: int = -1) -> list[Interval]:
        """Return the tokens of a member in one slice, by default the last one: none, one run or two."""
        index %= len(self.ends)
        start = self.ends[index - 1] if index else 0
        return [(start + a, start + b) for a, b in zigzag_ranges(self.ends[index] - start, width, member)]


def is_limited(length: int, window: int | None) -> bool:
    """Return whether a window limits what the tokens of a sequence see."""
    return window is not None and length > window + 1


def window_pass(sequences: Sequence[WindowSequence], route: Route, in_micro_batch: Rows, window: int) -> WindowPass:
    """Return the rows and blocks of one member of a ring. Pure; no communication.

    Args:
        sequences: those that the ring shares, ascending.
        route: the ring and the member; keys go straight to the members that need them.
        in_micro_batch: rows of its queries.
        window: the most keys before its own that a query sees.
    """
    ring, index = route.ring, route.index
    members = range(len(ring))
    needed = [[_needed(one.own_runs(len(ring), member), window) for member in members] for one in sequences]
    held = [[one.runs(len(ring), member) for member in members] for one in sequences]
    pool = [_Line(needs[index]) for needs in needed]
    keys = [_Line(runs[index], one.first_key) for runs, one in zip(held, sequences, strict=True)]
    first_pool_rows = list(accumulate((line.num_tokens for line in pool), initial=0))
    pool = [_Line(line.runs, first) for line, first in zip(pool, first_pool_rows, strict=False)]

    def shared(needing: int, holding: int, lines: Sequence[_Line]) -> Rows:
        """Return the rows, on given lines, of the keys that one member needs and another holds."""
        common = (_common(needs[needing], runs[holding]) for needs, runs in zip(needed, held, strict=True))
        return Rows.of(chain.from_iterable(line.rows(runs) for line, runs in zip(lines, common, strict=True)))

    wanted = {member: shared(member, index, keys) for member in members}
    sent = _union(chain.from_iterable(rows.intervals for rows in wanted.values()))
    in_sent = _Line(sent)
    places = {member: Rows.of(in_sent.rows(rows.intervals)) for member, rows in wanted.items()}
    others = [member for member in members if member != index]
    receives = {member: shared(index, member, pool) for member in others}
    return WindowPass(
        seqs=tuple(one.seq for one in sequences),
        in_micro_batch=in_micro_batch,
        keys=Rows.of(sent),
        num_keys=first_pool_rows[-1],
        own=(places[index], shared(index, index, pool)),
        sends=tuple((ring[member], places[member]) for member in others if places[member].num_rows),
        receives=tuple((ring[member], rows) for member, rows in receives.items() if rows.num_rows),
        blocks=_blocks([one.own_runs(len(ring), index) for one in sequences], pool, window),
    )


def _blocks(runs: Sequence[list[Interval]], pool: Sequence[_Line], window: int) -> tuple[PlacedBlock, ...]:
    """Return one block for the first runs of all sequences and one for their second runs, leaving out an empty one.

    ``runs``: of each sequence, the tokens of my queries; ``pool``: where its keys lie.
    """
    queries: tuple[list[Interval], list[Interval]] = ([], [])
    keys: tuple[list[Interval], list[Interval]] = ([], [])
    row = 0
    for line, of_sequence in zip(pool, runs, strict=True):
        for number, (start, stop) in enumerate(of_sequence):
            queries[number].append((row, row + stop - start))
            keys[number].extend(line.rows([(max(0, start - window), stop)]))
            row += stop - start
    found = (PlacedBlock.in_window(*both, window) for both in zip(queries, keys, strict=True))
    return share_values([block for block in found if not block.is_empty])


class _Line:
    """Runs of tokens (or rows), ascending, laid end to end from row ``first`` on."""

    def __init__(self, runs: Sequence[Interval], first: int = 0) -> None:
        self.runs = runs
        self._begins = list(accumulate((stop - start for start, stop in runs), initial=first))

    @property
    def num_tokens(self) -> int:
        return self._begins[-1] - self._begins[0]

    def rows(self, parts: Iterable[Interval]) -> list[Interval]:
        """Return the rows of parts of the tokens; each lies in one run."""
        found = []
        for start, stop in parts:
            places = zip(self.runs, self._begins, strict=False)
            row = next(begin + start - a for (a, b), begin in places if a <= start and stop <= b)
            found.append((row, row + stop - start))
        return found


def _needed(runs: Sequence[Interval], window: int) -> list[Interval]:
    """Return the tokens whose keys the queries of some runs see."""
    return _union((max(0, start - window), stop) for start, stop in runs)


def _union(parts: Iterable[Interval]) -> list[Interval]:
    """Return the intervals that some intervals cover together, ascending, none adjacent."""
    joined: list[Interval] = []
    for start, stop in sorted(parts):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
    return joined


def _common(some: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """Return the tokens that are in both, ascending; ``others`` are apart or adjacent, and stay apart."""
    found = [(max(a, c), min(b, d)) for a, b in some for c, d in others]
    return sorted((start, stop) for start, stop in found if start < stop)
