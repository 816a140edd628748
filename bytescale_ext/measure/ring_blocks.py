"""Times of the blocks of rings, for a cost file that a single rank measures.

All ranks of a ring run in turn on this device (``attention/virtual.py``), once for each block that they receive. A
message is a copy in the memory of the device, so the times include no network and no waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from bytescale_ext.attention.backend import Backend
from bytescale_ext.attention.kernels.contract import Gradients, Output, Saved
from bytescale_ext.attention.kernels.table import Kernel
from bytescale_ext.attention.layouts.layout import AttentionLayout, ring_pass
from bytescale_ext.attention.layouts.route import Route
from bytescale_ext.attention.layouts.rows import CuSeqlens, Rows
from bytescale_ext.attention.ring import attention_backward, attention_forward
from bytescale_ext.attention.virtual import mailbox_comms, run_in_turn
from bytescale_ext.measure.fit import Ring
from bytescale_ext.measure.speeds import Timer


@dataclass(frozen=True)
class Attention:
    """Attention of one layer on one rank.

    Attributes:
        kernel: kernel that computes blocks.
        heads, kv_heads, head_dim: sizes of the rank's heads.
        dtype: dtype of queries, keys and values.
        device: device that computes.
    """

    kernel: Kernel
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    def rows(self, num_rows: int, heads: int) -> torch.Tensor:
        """Return random numbers: ``[num_rows, heads, head_dim]``. The random state of training is left alone."""
        generator = torch.Generator(self.device).manual_seed(0)
        size = (num_rows, heads, self.head_dim)
        return torch.randn(size, generator=generator, dtype=self.dtype, device=self.device)


def block_seconds(ring: Ring, attention: Attention, timer: Callable[[], Timer]) -> tuple[float, float]:
    """Return the forward and backward seconds of a rank's blocks beyond its share of the sequences on one rank.

    Args:
        ring: lengths of the sequences, and the number of ranks that share them.
        attention: attention to measure.
        timer: function that returns a new timer for each pass.
    """
    lengths, width = ring
    alone = _seconds(ring_layouts(lengths, 1), attention, timer)
    shared = _seconds(ring_layouts(lengths, width), attention, timer)
    return (shared[0] - alone[0]) / width, (shared[1] - alone[1]) / width


def ring_layouts(lengths: Sequence[int], width: int) -> list[AttentionLayout]:
    """Return the layout of each rank of a ring that shares the sequences. One rank has local documents."""
    if width == 1:
        documents = CuSeqlens.of_lengths(lengths)
        return [AttentionLayout(documents.num_tokens, (), 0, documents, Rows.of([(0, documents.num_tokens)]))]
    passes = [ring_pass(lengths, Route(tuple(range(width)), place)) for place in range(width)]
    return [AttentionLayout(one.num_rows, (one,), one.num_rows, CuSeqlens((0,)), Rows(())) for one in passes]


def forward_in_turn(
    layouts: Sequence[AttentionLayout], inputs: Sequence[Sequence[torch.Tensor]], kernel: Kernel, scale: float
) -> list[Output]:
    """Return ``out [rows, heads, dim]`` and ``lse [heads, rows]`` of each virtual rank.

    ``inputs``: ``q, k, v, dout`` of each rank, ``[rows, heads or kv_heads, dim]``.
    """
    ranks = zip(inputs, layouts, mailbox_comms(len(layouts)), strict=True)
    return run_in_turn(
        [attention_forward(q, k, v, layout, Backend(comm, kernel, scale)) for (q, k, v, _), layout, comm in ranks]
    )


def backward_in_turn(
    layouts: Sequence[AttentionLayout],
    inputs: Sequence[Sequence[torch.Tensor]],
    outputs: Sequence[Output],
    kernel: Kernel,
    scale: float,
) -> list[Gradients]:
    """Return ``dq, dk, dv`` of each virtual rank, in the shapes of ``q, k, v``.

    ``inputs`` and ``outputs``: as in ``forward_in_turn``.
    """
    ranks = zip(inputs, outputs, layouts, mailbox_comms(len(layouts)), strict=True)
    return run_in_turn(
        [
            attention_backward(dout, Saved(q, k, v, *output), layout, Backend(comm, kernel, scale))
            for (q, k, v, dout), output, layout, comm in ranks
        ]
    )


def _seconds(
    layouts: Sequence[AttentionLayout], attention: Attention, timer: Callable[[], Timer]
) -> tuple[float, float]:
    """Return the forward and backward seconds of all ranks together, the fastest of several runs."""
    heads = (attention.heads, attention.kv_heads, attention.kv_heads, attention.heads)
    inputs = [[attention.rows(layout.num_rows, count) for count in heads] for layout in layouts]
    kernel, scale = attention.kernel, attention.head_dim**-0.5
    outputs = forward_in_turn(layouts, inputs, kernel, scale)
    return (
        timer().fastest(lambda: forward_in_turn(layouts, inputs, kernel, scale)),
        timer().fastest(lambda: backward_in_turn(layouts, inputs, outputs, kernel, scale)),
    )
