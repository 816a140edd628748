"""What travels round a ring: keys and values of a pass, and the sums of their gradients.

Messages are ``[2, rows, kv_heads, dim]``: keys, then values. ``ring.py`` says when each of them travels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from bytescale_ext.attention.kernels.contract import accumulation_dtype
from bytescale_ext.attention.layouts.layout import RingPass
from bytescale_ext.attention.layouts.rows import Rows
from bytescale_ext.parallel.p2p import Pending, Transfer

Exchange = Callable[[Sequence[Transfer], Sequence[Transfer]], Pending]


def add_kept(
    buffers: tuple[torch.Tensor, torch.Tensor],
    part: torch.Tensor,
    travelling: torch.Tensor | None,
    whole: Rows,
    own: Rows,
) -> None:
    """Add a member's key gradients to the micro-batch's sums, and the slice's sums to the gradients that travel to it.

    Args:
        buffers: ``[tk, kv_heads, dim]`` each, of the micro-batch.
        part: ``[2, rows, kv_heads, dim]``, of the rows ``whole``.
        travelling: ``[2, rows, kv_heads, dim]``, of the rows ``own``; None for my own keys.
        whole: rows of the member's keys up to the end of the slice.
        own: rows of its keys in the slice.
    """
    for index, buffer in enumerate(buffers):
        whole.add_(buffer, part[index])
        if travelling is not None:
            travelling[index].add_(own.take(buffer))


class TravellingKeys:
    """The keys and values of a pass on their way round the ring.

    Args:
        k, v: ``[tk, kv_heads, dim]``, of the micro-batch. Kept keys of other members are written there on arrival.
        ring_pass: what travels and in which order.
        exchange: starts an exchange.
    """

    def __init__(self, k: torch.Tensor, v: torch.Tensor, ring_pass: RingPass, exchange: Exchange) -> None:
        self._buffers = (k, v)
        self._pass = ring_pass
        self._exchange = exchange
        self._here = self._next = k[:0]  # nothing yet; kept keys do not travel in the backward pass

    def post(self, step: int) -> Pending | None:
        """Send the keys of this step on and start receiving the next ones; do nothing after the last step."""
        if step == self._pass.width - 1:
            return None
        if step == 0:
            self._here = torch.stack([self._pass.sent_keys.take(buffer) for buffer in self._buffers])
        rows = self._pass.travelling(self._pass.source(step + 1))
        self._next = self._here.new_empty((2, rows, *self._here.shape[2:]))
        return self._exchange([(self._here, self._pass.next_rank)], [(self._next, self._pass.previous_rank)])

    def arrive(self, step: int) -> None:
        """Take over the keys of a step, which have been received."""
        self._here = self._next
        if self._pass.kept is not None:
            for buffer, received in zip(self._buffers, self._here, strict=True):
                self._pass.kept.own[self._pass.source(step)].put_(buffer, received)

    def here(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values of the step's blocks: ``[rows, kv_heads, dim]`` each."""
        if self._pass.kept is None:
            return self._here[0], self._here[1]
        rows = self._pass.kept.whole[self._pass.source(step)]
        return rows.take(self._buffers[0]), rows.take(self._buffers[1])


def key_sums(num_rows: int, keys: torch.Tensor, filled: bool = True) -> torch.Tensor:
    """Return sums ``[2, num_rows, kv_heads, dim]`` for the gradients of keys and values.

    ``keys``: ``[tk, kv_heads, dim]``. The sums have its accumulation dtype, and are zeros if ``filled``, else empty.
    """
    make = torch.zeros if filled else torch.empty
    return make((2, num_rows, *keys.shape[1:]), dtype=accumulation_dtype(keys.dtype), device=keys.device)
