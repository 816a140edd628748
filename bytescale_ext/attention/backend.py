"""The kernel and the communication of attention, which the algorithms for rings and windows share."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace

import torch

from bytescale_ext.attention.kernels.contract import Gradients, Output, Saved
from bytescale_ext.attention.kernels.table import Kernel
from bytescale_ext.attention.latent import Expansion, Halves
from bytescale_ext.attention.layouts.blocks import PlacedBlock
from bytescale_ext.attention.layouts.rows import Rows
from bytescale_ext.attention.travel import ForwardResult, Keys, like
from bytescale_ext.parallel.p2p import Comm, Pending, Transfer

type Exchanges[Result] = Generator[Pending, None, Result]
"""A generator that yields each exchange where it must be complete, and returns a result."""


@dataclass(frozen=True)
class Backend:
    """The kernel and the communication of attention.

    Attributes:
        comm: communication between HDP ranks; None if no layout has rings.
        kernel: a row of ``kernels.table.kernel_table()``.
        scale: factor of the scores, usually ``dim ** -0.5``.
        sink: attention sink of each head, ``[heads]`` (``sink.py``), or None. Kernels and passes ignore it;
            ``ring_attention`` and ``slice_attention`` join it to their result.
        expansion: expansion of the latents, or of the halves of keys and values of different widths, that rings and
            slices have in place of keys and values (``latent.py``); None for plain keys and values.
        largest: largest score of each head so far, ``[heads]``, which forward passes raise (``largest.py``), or None.
    """

    comm: Comm | None
    kernel: Kernel
    scale: float
    sink: torch.Tensor | None = None
    expansion: Expansion | Halves | None = None
    largest: torch.Tensor | None = None

    @property
    def weights(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The tensors with gradients: the sink ``[heads]`` and the weight ``[numbers, key_rank]`` of the expansion."""
        return self.sink, None if self.expansion is None else self.expansion.weight

    def for_backward(self) -> Backend:
        """Return a copy for one backward pass, which accumulates the gradient of the expansion's weight."""
        return self if self.expansion is None else replace(self, expansion=self.expansion.with_gradient())

    def expansion_gradient(self) -> torch.Tensor | None:
        """Return the gradient of the expansion's weight, in its shape and dtype; None without an expansion."""
        expansion = self.expansion
        return (
            None if expansion is None or expansion.gradient is None else expansion.gradient.to(expansion.weight.dtype)
        )

    def value_dim(self, v: Keys) -> int:
        """Return the width of one head of the values; ``v``: values or second halves, ``[tk, kv_heads, dim]``."""
        return int(like(v).shape[2]) if self.expansion is None else self.expansion.value_dim

    def check(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, num_rows: int, *, travels: bool = False) -> None:
        """Raise ValueError unless ``q [num_rows, heads, dim]`` and ``k, v [num_rows, kv_heads, dim]`` fit each other.

        With an expansion, ``k, v`` are halves, ``[num_rows, kv_heads, half]``. ``travels``: keys and values share
        messages, so that their heads must have one width.
        """
        same = k.shape == v.shape if travels else k.shape[:2] == v.shape[:2]
        if self.expansion is not None:
            self.expansion.check((q, k, v), num_rows)
        elif q.shape[0] != num_rows or not same or k.shape[0] != q.shape[0] or q.shape[2] != k.shape[2]:
            raise ValueError(
                f"ring attention over {num_rows} rows needs q [rows, heads, dim] and k, v [rows, kv_heads, dim]; "
                f"got {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
            )
        elif q.shape[1] % k.shape[1] or not q.dtype == k.dtype == v.dtype:
            raise ValueError(
                f"ring attention needs heads to be a multiple of kv_heads and one dtype; got {q.shape[1]} and "
                f"{k.shape[1]} heads, {q.dtype}, {k.dtype}, {v.dtype}"
            )

    def exchange(self, sends: Sequence[Transfer], receives: Sequence[Transfer]) -> Pending:
        """Start an exchange; see ``RingComm.exchange``."""
        assert self.comm is not None, "a layout with rings needs a comm"
        return self.comm.exchange(sends, receives)

    def forward(self, q: torch.Tensor, k: Keys, v: Keys, block: PlacedBlock) -> Output:
        """Return ``out [rows, heads, value_dim]`` and ``lse [heads, rows]`` of a block's queries over its keys.

        ``q``: ``[t, heads, dim]``; ``k, v``: ``[tk, kv_heads, dim]``; the block selects rows.
        """
        queries, (keys, values) = block.queries.take(q), self._expanded(block.keys.take(k), block.keys.take(v))
        attention = block.attention(self.scale)
        if self.largest is not None:
            self.kernel.raise_largest(self.largest, queries, keys, attention)
        return self.kernel.forward(queries, keys, values, attention)

    def backward(self, dout: torch.Tensor, saved: ForwardResult, block: PlacedBlock) -> Gradients:
        """Return ``dq [rows, heads, dim]`` and ``dk, dv [key rows, kv_heads, dim]`` of a block's rows.

        ``dout``: ``[t, heads, value_dim]``.
        """
        rows, keys_and_values = block.queries, (block.keys.take(saved.k), block.keys.take(saved.v))
        block_out, block_lse = rows.take(saved.out), rows.take(saved.lse, dim=1)
        block_saved = Saved(rows.take(saved.q), *self._expanded(*keys_and_values), block_out, block_lse)
        dq, dk, dv = self.kernel.backward(rows.take(dout), block_saved, block.attention(self.scale))
        if self.expansion is not None:
            dk, dv = self.expansion.collapse(keys_and_values, (dk, dv))
        return dq, dk, dv

    def _expanded(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values ``[key rows, kv_heads, dim]``, expanded if they are halves."""
        return (k, v) if self.expansion is None else self.expansion.expand(k, v)


@dataclass(frozen=True)
class PendingGradients:
    """Gradients of this rank's keys of a pass that are still in transit.

    Attributes:
        keys: rows of the keys in the micro-batch.
        pending: exchange that delivers the last of the gradients.
        total: function to call after ``pending``. It returns the sum ``[2, rows, kv_heads, dim]`` of the gradients of
            keys and values. The sum includes this rank's own part, unless the keys are kept and the sums of the
            micro-batch already include it.
    """

    keys: Rows
    pending: Pending
    total: Callable[[], torch.Tensor]
