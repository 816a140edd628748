"""How attention is computed and exchanged: what the algorithms of rings and windows share."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import torch

from bytescale_ext.attention.kernels.contract import Gradients, Output, Saved
from bytescale_ext.attention.kernels.table import Kernel
from bytescale_ext.attention.layouts.blocks import PlacedBlock
from bytescale_ext.attention.layouts.rows import Rows
from bytescale_ext.attention.travel import Computed, Keys
from bytescale_ext.parallel.p2p import Comm, Pending, Transfer

type Steps[Result] = Generator[Pending, None, Result]


@dataclass(frozen=True)
class Backend:
    """How attention is computed and exchanged.

    Attributes:
        comm: exchange between HDP ranks; None where no layout has rings.
        kernel: one row of ``kernels.table.kernel_table()``.
        scale: factor of the scores, usually ``dim ** -0.5``.
        sink: of each head, ``[heads]`` (``sink.py``); None: none. Kernels and passes do without it; ``ring_attention``
            and ``slice_attention`` join it to their result.
    """

    comm: Comm | None
    kernel: Kernel
    scale: float
    sink: torch.Tensor | None = None

    def exchange(self, sends: Sequence[Transfer], receives: Sequence[Transfer]) -> Pending:
        """Start an exchange; see ``RingComm.exchange``."""
        assert self.comm is not None, "a layout with rings needs a comm"
        return self.comm.exchange(sends, receives)

    def forward(self, q: torch.Tensor, k: Keys, v: Keys, block: PlacedBlock) -> Output:
        """Return ``out [rows, heads, dim]`` and ``lse [heads, rows]`` of a block's queries over its keys.

        ``q``: ``[t, heads, dim]``; ``k, v``: ``[tk, kv_heads, dim]``; the block says which of their rows.
        """
        queries, keys = block.queries, block.keys
        return self.kernel.forward(queries.take(q), keys.take(k), keys.take(v), block.attention(self.scale))

    def backward(self, dout: torch.Tensor, saved: Computed, block: PlacedBlock) -> Gradients:
        """Return ``dq [rows, heads, dim]`` and ``dk, dv [key rows, kv_heads, dim]`` of a block's rows.

        ``dout``: ``[t, heads, dim]``.
        """
        rows, keys = block.queries, block.keys
        q, k, v, out, lse = saved
        of_block = Saved(rows.take(q), keys.take(k), keys.take(v), rows.take(out), rows.take(lse, dim=1))
        return self.kernel.backward(rows.take(dout), of_block, block.attention(self.scale))


@dataclass(frozen=True)
class Returning:
    """Gradients of my keys of a pass, on their way.

    Attributes:
        keys: rows of these keys in the micro-batch.
        pending: the exchange that delivers the last of them.
        total: returns their sum after ``pending``, ``[2, rows, kv_heads, dim]``: keys, values. My own part is in it,
            unless it is already in the sums of the micro-batch (kept keys).
    """

    keys: Rows
    pending: Pending
    total: Callable[[], torch.Tensor]
