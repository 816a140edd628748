"""Exchange of the states of the tokens after each token of a micro-batch, the targets of draft heads.

A rank that shares a sequence has some of its token ranges. The few tokens after each range are on other members of the
ring, which send their states. Every member knows all ranges from the layout, so no negotiation is needed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import numpy as np
import torch

from bytescale_ext.attention.layouts.layout import AttentionLayout, RingPass
from bytescale_ext.parallel.p2p import Pending, Transfer
from bytescale_ext.plan.step.micro_batch import uneven_ranges

NO_ROW = -1

type Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class LaterRows:
    """The rows of the tokens after each token of a rank, and the messages that deliver their states.

    Attributes:
        rows: int64 [t, count]; column j has the row of the token j + 1 places after each token, in the table of this
            rank's states followed by the received states. ``NO_ROW`` after the end of the sequence and in padding.
        sends: (rows of this rank's states, HDP rank) of each message, in order.
        receives: (number of states, HDP rank) of each message.
    """

    rows: torch.Tensor
    sends: tuple[tuple[tuple[int, ...], int], ...]
    receives: tuple[tuple[int, int], ...]

    def start(
        self, states: torch.Tensor, exchange: Callable[[Sequence[Transfer], Sequence[Transfer]], Pending]
    ) -> tuple[Pending | None, torch.Tensor]:
        """Start the exchange of states [t, h]. Return it and the table [t + received, h], complete after the exchange.

        Communicates on the ring group. All members of a ring must call this function for their common micro-batches in
        the same order. The exchange is None if the rank shares no sequence.
        """
        counts = [count for count, _ in self.receives]
        table = torch.cat((states, states.new_empty(sum(counts), states.shape[1])))
        if not self.sends and not self.receives:
            return None, table
        parts = table[len(states) :].split(counts)
        device = states.device
        sends = [(states[torch.tensor(rows, device=device)].contiguous(), peer) for rows, peer in self.sends]
        receives = [(part, peer) for part, (_, peer) in zip(parts, self.receives, strict=True)]
        return exchange(sends, receives), table


def later_rows(layout: AttentionLayout, count: int) -> LaterRows:
    """Return the rows of the ``count`` tokens after each token of a micro-batch without slices and windows. Pure."""
    builder = _Builder(np.full((layout.num_rows, count), NO_ROW, dtype=np.int64), layout.num_rows)
    for ring_pass in layout.passes:
        _add_pass(builder, ring_pass, count)
    for start, stop in pairwise(layout.local.offsets):
        for ahead in range(1, min(count, stop - start - 1) + 1):
            begin, end = layout.local_start + start, layout.local_start + stop
            builder.rows[begin : end - ahead, ahead - 1] = np.arange(begin + ahead, end)
    return LaterRows(torch.from_numpy(builder.rows), tuple(builder.sends), tuple(builder.receives))


@dataclass
class _Builder:
    """``LaterRows`` under construction; ``num_states``: the number of own and received states so far."""

    rows: np.ndarray
    num_states: int
    sends: list[tuple[tuple[int, ...], int]] = field(default_factory=list)
    receives: list[tuple[int, int]] = field(default_factory=list)


def _add_pass(builder: _Builder, ring_pass: RingPass, count: int) -> None:
    """Add the sequences of a ring pass."""
    index, width = ring_pass.index, ring_pass.width
    lengths = [sum(share[number] for share in ring_pass.shares) for number in range(len(ring_pass.seqs))]
    of_seqs = zip(*ring_pass.shares, strict=True)
    ranges = [[uneven_ranges(shares, member) for member in range(width)] for shares in of_seqs]
    rows = [row for start, stop in ring_pass.in_micro_batch.intervals for row in range(start, stop)]
    firsts = [0, *accumulate(ring_pass.shares[index])]
    # For each sequence, the row of each token: own tokens, and later also received tokens.
    own_rows = [_rows_by_token(shares[index], rows[first:]) for shares, first in zip(ranges, firsts, strict=False)]
    all_rows = [dict(row_of) for row_of in own_rows]
    for member, peer in enumerate(ring_pass.ring):
        if member == index:
            continue
        sent: list[int] = []
        first = builder.num_states
        for shares, own_row_of, row_of, length in zip(ranges, own_rows, all_rows, lengths, strict=True):
            sent += [own_row_of[token] for token in _needed(shares[member], length, count) if token in own_row_of]
            received = [token for token in _needed(shares[index], length, count) if _contain(shares[member], token)]
            row_of.update(zip(received, range(builder.num_states, builder.num_states + len(received)), strict=True))
            builder.num_states += len(received)
        builder.sends += [(tuple(sent), peer)] if sent else []
        builder.receives += [(builder.num_states - first, peer)] if builder.num_states > first else []
    for own_row_of, row_of in zip(own_rows, all_rows, strict=True):
        for token, row in own_row_of.items():
            builder.rows[row] = [row_of.get(token + ahead, NO_ROW) for ahead in range(1, count + 1)]


def _rows_by_token(ranges: Ranges, rows: Sequence[int]) -> dict[int, int]:
    """Return the row of each token of some ranges; ``rows`` starts with the rows of these tokens."""
    tokens = [token for start, stop in ranges for token in range(start, stop)]
    return dict(zip(tokens, rows, strict=False))


def _needed(ranges: Ranges, length: int, count: int) -> list[int]:
    """Return the tokens at most ``count`` places after the end of a range and outside of all ranges, ascending."""
    tokens = {token for _, stop in ranges for token in range(stop, min(stop + count, length))}
    return sorted(token for token in tokens if not _contain(ranges, token))


def _contain(ranges: Ranges, token: int) -> bool:
    """Return whether a token is in one of some ascending ranges."""
    number = bisect_right(ranges, (token, np.inf)) - 1
    return number >= 0 and token < ranges[number][1]
