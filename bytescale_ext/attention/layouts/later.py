"""States of the tokens after each token of a micro-batch, which draft heads are compared with.

A rank that shares a sequence holds some of its tokens. The few that follow each of its token ranges lie on other
members of the ring, which send them. Every member knows all ranges from the layout, so nothing is agreed upon.
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
from bytescale_ext.plan.step.micro_batch import zigzag_ranges

NO_ROW = -1

type Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class LaterRows:
    """Where a rank finds the tokens after each of its own.

    Attributes:
        rows: int64 [t, count]: among the states of this rank and then the received ones, the row of the token so many
            places after each row, from 1 on; ``NO_ROW`` where the sequence has ended, and in padding.
        sends: (rows of this rank's states, HDP rank) of each message, in the order in which it is sent.
        receives: (number of states, HDP rank) of each message.
    """

    rows: torch.Tensor
    sends: tuple[tuple[tuple[int, ...], int], ...]
    receives: tuple[tuple[int, int], ...]

    def start(
        self, states: torch.Tensor, exchange: Callable[[Sequence[Transfer], Sequence[Transfer]], Pending]
    ) -> tuple[Pending | None, torch.Tensor]:
        """Start the exchange of states [t, h]; return it and [t + received, h], whole once the exchange has ended.

        Communicates on the ring group; every member of a ring must call it for the micro-batches that share a sequence
        in the same order. The exchange is None where the rank shares nothing.
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
    """Return where the ``count`` tokens after each row of a micro-batch without slices and windows are. Pure."""
    found = _Found(np.full((layout.num_rows, count), NO_ROW, dtype=np.int64), layout.num_rows)
    for one in layout.passes:
        _add_pass(found, one, count)
    for start, stop in pairwise(layout.local.offsets):
        for ahead in range(1, min(count, stop - start - 1) + 1):
            begin, end = layout.local_start + start, layout.local_start + stop
            found.rows[begin : end - ahead, ahead - 1] = np.arange(begin + ahead, end)
    return LaterRows(torch.from_numpy(found.rows), tuple(found.sends), tuple(found.receives))


@dataclass
class _Found:
    """What has been found so far; ``num_states``: own and received ones."""

    rows: np.ndarray
    num_states: int
    sends: list[tuple[tuple[int, ...], int]] = field(default_factory=list)
    receives: list[tuple[int, int]] = field(default_factory=list)


def _add_pass(found: _Found, one: RingPass, count: int) -> None:
    """Add the sequences that one ring shares."""
    lengths = [sum(share[place] for share in one.shares) for place in range(len(one.seqs))]
    holdings = [[zigzag_ranges(length, one.width, member) for member in range(one.width)] for length in lengths]
    rows = [row for start, stop in one.in_micro_batch.intervals for row in range(start, stop)]
    firsts = [0, *accumulate(one.shares[one.index])]
    own = [_own_rows(held[one.index], rows[first:]) for held, first in zip(holdings, firsts, strict=False)]
    places = [dict(of_sequence) for of_sequence in own]  # of each sequence: token -> row of its state
    for member, peer in enumerate(one.ring):
        sent: list[int] = []
        first = found.num_states
        for held, of_sequence, place, length in zip(holdings, own, places, lengths, strict=True):
            if member != one.index:
                sent += [of_sequence[t] for t in _needed(held[member], length, count) if t in of_sequence]
                wanted = [t for t in _needed(held[one.index], length, count) if _holds(held[member], t)]
                place.update(zip(wanted, range(found.num_states, found.num_states + len(wanted)), strict=True))
                found.num_states += len(wanted)
        found.sends += [(tuple(sent), peer)] if sent else []
        found.receives += [(found.num_states - first, peer)] if found.num_states > first else []
    for of_sequence, place in zip(own, places, strict=True):
        for token, row in of_sequence.items():
            found.rows[row] = [place.get(token + ahead, NO_ROW) for ahead in range(1, count + 1)]


def _own_rows(ranges: Ranges, rows: Sequence[int]) -> dict[int, int]:
    """Return the row of each token of some ranges, whose tokens have these rows."""
    tokens = [token for start, stop in ranges for token in range(start, stop)]
    return dict(zip(tokens, rows, strict=False))


def _needed(ranges: Ranges, length: int, count: int) -> list[int]:
    """Return the tokens of a sequence that follow some of its ranges within ``count`` places, ascending."""
    wanted = {token for _, stop in ranges for token in range(stop, min(stop + count, length))}
    return sorted(token for token in wanted if not _holds(ranges, token))


def _holds(ranges: Ranges, token: int) -> bool:
    """Return whether a token is in one of some ascending ranges."""
    place = bisect_right(ranges, (token, np.inf)) - 1
    return place >= 0 and token < ranges[place][1]
