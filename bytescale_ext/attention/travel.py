"""What travels round a ring: keys and values of a pass, and the sums of their gradients.

Messages are ``[2, rows, kv_heads, dim]``: keys, then values. ``ring.py`` says when each of them travels.
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
"""Keys, values or sums of their gradients, ``[tk, kv_heads, dim]``: of a micro-batch, or slice by slice."""

Exchange = Callable[[Sequence[Transfer], Sequence[Transfer]], Pending]


class Computed(NamedTuple):
    """Inputs ``q, k, v`` and outputs ``out, lse`` of a forward pass, as its backward pass takes them.

    Shapes as in ``kernels/contract.py``; keys are those of the whole micro-batch.
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
    """Add a member's key gradients to the micro-batch's sums, and the slice's sums to the gradients that travel to it.

    Args:
        totals: the sums, ``[tk, kv_heads, dim]`` each, of the micro-batch.
        part: ``[2, rows, kv_heads, dim]``, of the rows ``whole``.
        travelling: ``[2, rows, kv_heads, dim]``, of the rows ``own``; None for my own keys.
        whole: rows of the member's keys up to the end of the slice.
        own: rows of its keys in the slice.
    """
    for index, total in enumerate(totals):
        whole.add_(total, part[index])
        if travelling is not None:
            travelling[index].add_(own.take(total))


class TravellingKeys:
    """The keys and values of a pass on their way round the ring.

    In a hierarchical ring a member sends the keys that it holds at the start of a round to its counterpart in parts,
    one with each step of the round, so that every exchange is one batch and the link between nodes is always busy.

    Args:
        k, v: ``[tk, kv_heads, dim]``, of the micro-batch. Kept keys of other members are written there on arrival.
        ring_pass: what travels and in which order.
        exchange: starts an exchange.
    """

    def __init__(self, k: Keys, v: Keys, ring_pass: RingPass, exchange: Exchange) -> None:
        self._held = (k, v)
        self._pass = ring_pass
        self._exchange = exchange
        nothing = like(k)[:0]  # kept keys do not travel in the backward pass
        self._here = self._next = nothing
        self._leaving = self._arriving = nothing  # keys at the start of this round and of the next one

    def post(self, step: int) -> Pending | None:
        """Send the keys of this step on and start receiving the next ones; do nothing after the last step."""
        route = self._pass.route
        if step == 0:
            self._here = torch.stack([self._pass.sent_keys.take(held) for held in self._held])
        number, hop = divmod(step, route.inner_width)
        sends, receives = [], []
        if hop < route.inner_width - 1:
            self._next = self._empty(step + 1)
            sends.append((self._here, route.next_rank))
            receives.append((self._next, route.previous_rank))
        if number < route.inner_rings - 1:
            if hop == 0:
                self._leaving, self._arriving = self._here, self._empty(step + route.inner_width)
            sends.append((part_of(self._leaving, hop, route), route.next_counterpart))
            receives.append((part_of(self._arriving, hop, route), route.previous_counterpart))
        return self._exchange(sends, receives) if sends else None

    def arrive(self, step: int) -> None:
        """Take over the keys of a step, which have been received."""
        self._here = self._next if step % self._pass.route.inner_width else self._arriving
        if self._pass.kept is not None:
            for held, received in zip(self._held, self._here, strict=True):
                self._pass.kept.own[self._pass.source(step)].put_(held, received)

    def here(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values of the step's blocks: ``[rows, kv_heads, dim]`` each."""
        if self._pass.kept is None:
            return self._here[0], self._here[1]
        rows = self._pass.kept.whole[self._pass.source(step)]
        return rows.take(self._held[0]), rows.take(self._held[1])

    def _empty(self, step: int) -> torch.Tensor:
        """Return room for the keys of a step, ``[2, rows, kv_heads, dim]``."""
        rows = self._pass.travelling(self._pass.source(step))
        return self._here.new_empty((2, rows, *self._here.shape[2:]))


class TravellingSums:
    """The sums of key gradients of a pass on their way home, one step behind the keys.

    In each round the members of an inner ring add up the gradients of the keys that they see in it. A sum starts at the
    member after the one that held the keys first, visits the others and ends there. The sum of round 0 is at home then.
    Later ones are joined to the sum of the inner rings before, which has come in parts during the round; the total goes
    on to the counterpart during the next round, and after the last round home. A plain ring has only round 0.

    Args:
        keys: ``[tk, kv_heads, dim]``, of the micro-batch.
        ring_pass: what travels and in which order.
        exchange: starts an exchange.

    Attributes:
        home: sums of my keys' gradients on other ranks, ``[2, rows, kv_heads, dim]`` each, once all exchanges are
            complete: of my inner ring, then of the others.
    """

    def __init__(self, keys: Keys, ring_pass: RingPass, exchange: Exchange) -> None:
        self._keys = keys
        self._pass = ring_pass
        self._exchange = exchange
        nothing = key_sums(0, keys)
        self._here = self._next = nothing
        self._mine = nothing  # my part of the sum that ends at me in this round
        self._leaving = self._arriving = nothing  # totals: of the round before, and of the inner rings before
        self.home: list[torch.Tensor] = []

    def here(self, step: int) -> torch.Tensor:
        """Return the sum ``[2, rows, kv_heads, dim]`` to which my gradients of a step are added.

        All exchanges that were posted before must be complete. My own keys, at step 0, have none.
        """
        number, hop = divmod(step, self._pass.route.inner_width)
        assert step > 0, f"{step=}"
        rows = self._pass.travelling_sums(self._pass.source(step))
        if hop == 0:
            self._end_round(number - 1)
            self._mine = key_sums(rows, self._keys)
            return self._mine
        self._here = key_sums(rows, self._keys) if hop == 1 else self._next
        return self._here

    def post(self, step: int) -> Pending | None:
        """Send the sums of this step on and start receiving the next ones; at step 0 there are none yet."""
        route = self._pass.route
        number, hop = divmod(step, route.inner_width)
        first = step - hop
        sends, receives = [], []
        if hop > 0:
            self._next = self._empty(first + (hop + 1) % route.inner_width)
            sends.append((self._here, route.next_rank))
            receives.append((self._next, route.previous_rank))
        if step == route.inner_width - 1:
            self.home.append(self._next)
        if number > 1:
            if hop == 0:
                self._arriving = self._empty(step)
            sends.append((part_of(self._leaving, hop, route), route.next_counterpart))
            receives.append((part_of(self._arriving, hop, route), route.previous_counterpart))
        return self._exchange(sends, receives) if sends else None

    def post_home(self) -> Pending:
        """Send the total of the last round home, after all other exchanges of a hierarchical ring."""
        route = self._pass.route
        self._end_round(route.inner_rings - 1)
        self._arriving = self._empty(0)
        self.home.append(self._arriving)
        return self._exchange([(self._leaving, route.next_counterpart)], [(self._arriving, route.previous_counterpart)])

    def _end_round(self, number: int) -> None:
        """Make the total of a round whose exchanges are complete; that of round 0 goes no further."""
        if number > 0:
            self._leaving = self._mine.add_(self._next)
        if number > 1:
            self._leaving.add_(self._arriving)

    def _empty(self, step: int) -> torch.Tensor:
        """Return room for the sum of a step's keys, ``[2, rows, kv_heads, dim]``."""
        return key_sums(self._pass.travelling_sums(self._pass.source(step)), self._keys, filled=False)


def part_of(message: torch.Tensor, hop: int, route: Route) -> torch.Tensor:
    """Return what one step of a round sends of a message ``[2, rows, kv_heads, dim]``: a flat view."""
    return message.view(-1).tensor_split(route.inner_width)[hop]


def key_sums(num_rows: int, keys: Keys, filled: bool = True) -> torch.Tensor:
    """Return sums ``[2, num_rows, kv_heads, dim]`` for the gradients of keys and values.

    ``keys``: ``[tk, kv_heads, dim]``. The sums have its accumulation dtype, and are zeros if ``filled``, else empty.
    """
    make, example = torch.zeros if filled else torch.empty, like(keys)
    return make((2, num_rows, *example.shape[1:]), dtype=accumulation_dtype(example.dtype), device=example.device)


def like(keys: Keys) -> torch.Tensor:
    """Return a tensor ``[rows, kv_heads, dim]`` with the dtype and device of ``keys [tk, kv_heads, dim]``."""
    return keys.like if isinstance(keys, RowParts) else keys
