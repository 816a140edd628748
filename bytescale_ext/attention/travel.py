"""What travels round a ring: keys and values of a pass, and the sums of their gradients.

Messages are ``[2, rows, kv_heads, dim]``: keys, then values. ``ring.py`` says when each of them travels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from bytescale_ext.attention.kernels.contract import accumulation_dtype
from bytescale_ext.attention.layouts.layout import RingPass
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

    Args:
        k, v: ``[tk, kv_heads, dim]``, of the micro-batch. Kept keys of other members are written there on arrival.
        ring_pass: what travels and in which order.
        exchange: starts an exchange.
    """

    def __init__(self, k: Keys, v: Keys, ring_pass: RingPass, exchange: Exchange) -> None:
        self._held = (k, v)
        self._pass = ring_pass
        self._exchange = exchange
        self._here = self._next = like(k)[:0]  # nothing yet; kept keys do not travel in the backward pass

    def post(self, step: int) -> Pending | None:
        """Send the keys of this step on and start receiving the next ones; do nothing after the last step."""
        if step == self._pass.width - 1:
            return None
        if step == 0:
            self._here = torch.stack([self._pass.sent_keys.take(held) for held in self._held])
        rows = self._pass.travelling(self._pass.source(step + 1))
        self._next = self._here.new_empty((2, rows, *self._here.shape[2:]))
        return self._exchange([(self._here, self._pass.next_rank)], [(self._next, self._pass.previous_rank)])

    def arrive(self, step: int) -> None:
        """Take over the keys of a step, which have been received."""
        self._here = self._next
        if self._pass.kept is not None:
            for held, received in zip(self._held, self._here, strict=True):
                self._pass.kept.own[self._pass.source(step)].put_(held, received)

    def here(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values of the step's blocks: ``[rows, kv_heads, dim]`` each."""
        if self._pass.kept is None:
            return self._here[0], self._here[1]
        rows = self._pass.kept.whole[self._pass.source(step)]
        return rows.take(self._held[0]), rows.take(self._held[1])


def key_sums(num_rows: int, keys: Keys, filled: bool = True) -> torch.Tensor:
    """Return sums ``[2, num_rows, kv_heads, dim]`` for the gradients of keys and values.

    ``keys``: ``[tk, kv_heads, dim]``. The sums have its accumulation dtype, and are zeros if ``filled``, else empty.
    """
    make, example = torch.zeros if filled else torch.empty, like(keys)
    return make((2, num_rows, *example.shape[1:]), dtype=accumulation_dtype(example.dtype), device=example.device)


def like(keys: Keys) -> torch.Tensor:
    """Return a tensor ``[rows, kv_heads, dim]`` with the dtype and device of ``keys [tk, kv_heads, dim]``."""
    return keys.like if isinstance(keys, RowParts) else keys
