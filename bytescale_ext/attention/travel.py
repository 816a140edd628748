"""Transfers round a ring: keys and values of a pass, and the sums of their gradients.

Messages are ``[2, rows, kv_heads, dim]``: keys, then values. ``ring.py`` decides when each of them travels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from bytescale_ext.attention.kernels.contract import accumulation_dtype
from bytescale_ext.attention.layouts.layout import RingPass
from bytescale_ext.attention.layouts.route import Route
from bytescale_ext.attention.layouts.rows import RowParts, Rows
from bytescale_ext.parallel.p2p import Pending, Transfer

type Keys = torch.Tensor | RowParts
"""Keys, values or sums of their gradients, ``[tk, kv_heads, dim]``, in one tensor or slice by slice."""

Exchange = Callable[[Sequence[Transfer], Sequence[Transfer]], Pending]


class ForwardResult(NamedTuple):
    """Inputs ``q, k, v`` and outputs ``out, lse`` of a forward pass, which its backward pass needs.

    Shapes as in ``kernels/contract.py``; keys and values of the whole micro-batch.
    """

    q: torch.Tensor
    k: Keys
    v: Keys
    out: torch.Tensor
    lse: torch.Tensor


def add_kept(
    totals: tuple[Keys, Keys],
    part: torch.Tensor,
    travelling: torch.Tensor | None,
    whole: Rows,
    own: Rows,
) -> None:
    """Add key gradients of a member to the sums of the micro-batch, and the slice's sums to the travelling gradients.

    Args:
        totals: sums of the micro-batch for keys and for values, ``[tk, kv_heads, dim]`` each.
        part: gradients of the rows ``whole``, ``[2, rows, kv_heads, dim]``.
        travelling: travelling gradients of the rows ``own``, ``[2, rows, kv_heads, dim]``; None for this rank's keys.
        whole: rows of the member's keys up to the end of the slice.
        own: rows of the member's keys in the slice.
    """
    for index, total in enumerate(totals):
        whole.add_(total, part[index])
        if travelling is not None:
            travelling[index].add_(own.take(total))


class TravellingKeys:
    """Keys and values of a pass that travel round the ring.

    In a hierarchical ring a member sends the keys that it has at the start of a round to its counterpart. It sends them
    in parts, one with each hop of the round, so that every exchange is one batch and the link between nodes is always
    busy.

    Args:
        k, v: keys and values of the micro-batch, ``[tk, kv_heads, dim]``. Kept keys of other members are written there
            on arrival.
        ring_pass: rows and route of the pass.
        exchange: function that starts an exchange.
    """

    def __init__(self, k: Keys, v: Keys, ring_pass: RingPass, exchange: Exchange) -> None:
        self._held = (k, v)
        self._pass = ring_pass
        self._exchange = exchange
        nothing = like(k)[:0]  # the backward pass of kept keys sends none
        self._here = self._next = nothing
        self._leaving = self._arriving = nothing  # keys at the start of this round and of the next round

    def post(self, hop: int) -> Pending | None:
        """Forward the keys of this hop and start receiving the next keys. Return None after the last hop."""
        route = self._pass.route
        if hop == 0:
            self._here = torch.stack([self._pass.sent_keys.take(held) for held in self._held])
        round_number, inner_hop = divmod(hop, route.inner_width)
        sends, receives = [], []
        if inner_hop < route.inner_width - 1:
            self._next = self._empty(hop + 1)
            sends.append((self._here, route.next_rank))
            receives.append((self._next, route.previous_rank))
        if round_number < route.inner_rings - 1:
            if inner_hop == 0:
                self._leaving, self._arriving = self._here, self._empty(hop + route.inner_width)
            sends.append((part_of(self._leaving, inner_hop, route), route.next_counterpart))
            receives.append((part_of(self._arriving, inner_hop, route), route.previous_counterpart))
        return self._exchange(sends, receives) if sends else None

    def arrive(self, hop: int) -> None:
        """Use the received keys of a hop from now on."""
        self._here = self._next if hop % self._pass.route.inner_width else self._arriving
        if self._pass.kept is not None:
            for held, received in zip(self._held, self._here, strict=True):
                self._pass.kept.own[self._pass.source(hop)].put_(held, received)

    def here(self, hop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values of a hop's blocks, ``[rows, kv_heads, dim]`` each."""
        if self._pass.kept is None:
            keys, values = self._here.unbind()
            return keys, values
        rows = self._pass.kept.whole[self._pass.source(hop)]
        return rows.take(self._held[0]), rows.take(self._held[1])

    def _empty(self, hop: int) -> torch.Tensor:
        """Return uninitialized memory for the keys of a hop, ``[2, rows, kv_heads, dim]``."""
        rows = self._pass.travelling(self._pass.source(hop))
        return self._here.new_empty((2, rows, *self._here.shape[2:]))


class TravellingSums:
    """Sums of key gradients of a pass that travel to the owners of the keys, one hop behind the keys.

    In each round the members of an inner ring sum the gradients of the keys that visit the ring. A sum starts at the
    successor of the member that has the keys at the start of the round, visits the other members and ends at that
    member. After round 0 this member is the owner of the keys, so the sum has arrived. After a later round the sum is
    added to the sum of the previous inner rings, which has arrived in parts during the round. The total travels to the
    counterpart during the next round, and to the owner after the last round. A plain ring has only round 0.

    Args:
        keys: keys of the micro-batch, ``[tk, kv_heads, dim]``.
        ring_pass: rows and route of the pass.
        exchange: function that starts an exchange.

    Attributes:
        home: sums of other ranks' gradients of this rank's keys, ``[2, rows, kv_heads, dim]`` each, which are valid
            once all exchanges are complete: the sum of this rank's inner ring, then the sum of the other inner rings.
    """

    def __init__(self, keys: Keys, ring_pass: RingPass, exchange: Exchange) -> None:
        self._keys = keys
        self._pass = ring_pass
        self._exchange = exchange
        nothing = key_sums(0, keys)
        self._here = self._next = nothing
        self._mine = nothing  # this rank's part of the sum that ends here in this round
        self._leaving = self._arriving = nothing  # totals of the previous round and of the previous inner rings
        self.home: list[torch.Tensor] = []

    def here(self, hop: int) -> torch.Tensor:
        """Return the sum ``[2, rows, kv_heads, dim]`` to which this rank adds its gradients of a hop.

        All exchanges posted so far must be complete. Step 0, with this rank's own keys, has no such sum.
        """
        round_number, inner_hop = divmod(hop, self._pass.route.inner_width)
        assert hop > 0, f"{hop=}"
        rows = self._pass.travelling_sums(self._pass.source(hop))
        if inner_hop == 0:
            self._end_round(round_number - 1)
            self._mine = key_sums(rows, self._keys)
            return self._mine
        self._here = key_sums(rows, self._keys) if inner_hop == 1 else self._next
        return self._here

    def post(self, hop: int) -> Pending | None:
        """Forward the sums of this hop and start receiving the next sums. Return None if there are none yet."""
        route = self._pass.route
        round_number, inner_hop = divmod(hop, route.inner_width)
        first = hop - inner_hop
        sends, receives = [], []
        if inner_hop > 0:
            self._next = self._empty(first + (inner_hop + 1) % route.inner_width)
            sends.append((self._here, route.next_rank))
            receives.append((self._next, route.previous_rank))
        if hop == route.inner_width - 1:
            self.home.append(self._next)
        if round_number > 1:
            if inner_hop == 0:
                self._arriving = self._empty(hop)
            sends.append((part_of(self._leaving, inner_hop, route), route.next_counterpart))
            receives.append((part_of(self._arriving, inner_hop, route), route.previous_counterpart))
        return self._exchange(sends, receives) if sends else None

    def post_home(self) -> Pending:
        """Send the total of the last round to the owner of the keys, after all other exchanges of the ring."""
        route = self._pass.route
        self._end_round(route.inner_rings - 1)
        self._arriving = self._empty(0)
        self.home.append(self._arriving)
        return self._exchange([(self._leaving, route.next_counterpart)], [(self._arriving, route.previous_counterpart)])

    def _end_round(self, round_number: int) -> None:
        """Compute the total of a round whose exchanges are complete. The sum of round 0 has already arrived."""
        if round_number > 0:
            self._leaving = self._mine.add_(self._next)
        if round_number > 1:
            self._leaving.add_(self._arriving)

    def _empty(self, hop: int) -> torch.Tensor:
        """Return uninitialized memory for the sum of a hop's keys, ``[2, rows, kv_heads, dim]``."""
        return key_sums(self._pass.travelling_sums(self._pass.source(hop)), self._keys, filled=False)


def part_of(message: torch.Tensor, inner_hop: int, route: Route) -> torch.Tensor:
    """Return the part of a message ``[2, rows, kv_heads, dim]`` for hop ``inner_hop`` of a round, as a flat view."""
    return message.view(-1).tensor_split(route.inner_width)[inner_hop]


def key_sums(num_rows: int, keys: Keys, filled: bool = True) -> torch.Tensor:
    """Return sums ``[2, num_rows, kv_heads, dim]`` for the gradients of keys and values, in the accumulation dtype.

    ``keys``: ``[tk, kv_heads, dim]``. The sums are zeros if ``filled``, else uninitialized.
    """
    make, example = torch.zeros if filled else torch.empty, like(keys)
    return make((2, num_rows, *example.shape[1:]), dtype=accumulation_dtype(example.dtype), device=example.device)


def like(keys: Keys) -> torch.Tensor:
    """Return a tensor ``[rows, kv_heads, dim]`` with the dtype and device of ``keys [tk, kv_heads, dim]``."""
    return keys.like if isinstance(keys, RowParts) else keys
