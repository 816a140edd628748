"""Causal attention of a micro-batch that arrives in slices: each slice attends to itself and to all slices before it.

Keys and values of a micro-batch lie in one buffer for each layer; a slice writes its own rows and reads those of all
slices up to it, its own and, in a ring, those of the other members (``slice_layout.py`` has the geometry).

The backward passes run from the last slice to the first. Each adds its gradients of keys and values to a float32
buffer, from which every slice takes its own when its turn comes. Writing a slice twice changes nothing, so activation
recomputation may run a slice's forward pass as often as it likes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import torch

from bytescale_ext.attention.kernels import Kernel
from bytescale_ext.attention.reference import accumulation_dtype
from bytescale_ext.attention.ring import RingContext, backward_steps, check_tensors, drive, forward_steps
from bytescale_ext.attention.slice_layout import SliceLayout
from bytescale_ext.parallel.p2p import Comm


@dataclass
class LayerPrefix:
    """Keys and values of one micro-batch in one layer.

    Attributes:
        key, value: [num_keys, kv_heads, dim], written slice by slice.
        sums: the gradients of keys and of values that slices have added so far, each of the same shape in float32
            (float64 for float64 keys); None before the first backward pass and after the last.
        next_backward: index of the slice whose backward pass is due, or None before the last slice's.
    """

    key: torch.Tensor
    value: torch.Tensor
    sums: tuple[torch.Tensor, torch.Tensor] | None = None
    next_backward: int | None = None

    def start_backward(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Note that a slice's gradients are computed now; they come from the last slice to the first. The sums."""
        if self.sums is None:
            precise = accumulation_dtype(self.key.dtype)
            self.sums = torch.zeros_like(self.key, dtype=precise), torch.zeros_like(self.value, dtype=precise)
            self.next_backward = index
        assert self.next_backward == index, f"{self.next_backward=} {index=}"
        self.next_backward -= 1
        return self.sums

    def end_backward(self, index: int) -> None:
        """Free the sums when the first slice, the last one to come, has taken its part."""
        if not index:
            self.sums = self.next_backward = None


@dataclass
class MicroBatchPrefix:
    """The prefix of one micro-batch in all layers of one model chunk, kept from its first forward to its last use.

    Attributes:
        num_keys: rows of the whole micro-batch.
        layers: by the attention module that wrote it.
    """

    num_keys: int
    layers: dict[Any, LayerPrefix] = field(default_factory=dict)

    def layer(self, owner: Any, key: torch.Tensor, value: torch.Tensor) -> LayerPrefix:
        """The buffers of a layer, allocated for its first slice. ``key``, ``value``: [t, kv_heads, dim]."""
        if owner not in self.layers:
            shapes = (self.num_keys, *key.shape[1:]), (self.num_keys, *value.shape[1:])
            self.layers[owner] = LayerPrefix(key.new_empty(shapes[0]), value.new_empty(shapes[1]))
        return self.layers[owner]

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers."""
        tensors = [t for layer in self.layers.values() for t in (layer.key, layer.value, *(layer.sums or ()))]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def slice_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    prefix: LayerPrefix,
    layout: SliceLayout,
    comm: Comm | None,
    kernel: Kernel,
    scale: float,
) -> torch.Tensor:
    """Attention of one slice over itself and everything before it, with gradients.

    Args:
        q: [t, heads, dim], the slice's; ``t == layout.num_rows``.
        k, v: [t, kv_heads, dim].
        prefix: the layer's buffers; all earlier slices have been written.
        layout: the rows of this rank.
        comm, kernel, scale: as ``ring_attention``; no comm where no layout has rings.

    Returns:
        [t, heads, dim]; padding rows are zero, as are their gradients.

    Communicates, like ``ring_attention``, on the ring group. Raises ValueError for tensors that do not fit.
    """
    check_tensors(q, k, v, layout.num_rows)
    assert comm is not None or not layout.attention.passes, f"{layout=}"
    ring = RingContext(layout.attention, cast(Comm, comm), kernel, scale)
    out: torch.Tensor = _SliceAttention.apply(q, k, v, prefix, layout, ring)
    return out


class _SliceAttention(torch.autograd.Function):
    """Saves the slice's queries, output and log-sum-exp; keys and values stay in the buffer."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        prefix: LayerPrefix,
        layout: SliceLayout,
        ring: RingContext,
    ) -> torch.Tensor:
        num_tokens = layout.own.num_rows
        layout.own.put_(prefix.key, k[:num_tokens])
        layout.own.put_(prefix.value, v[:num_tokens])
        out, lse = drive(forward_steps(q, prefix.key, prefix.value, ring))
        ctx.save_for_backward(q, out, lse)
        ctx.settings = (prefix, layout, ring)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, out, lse = ctx.saved_tensors
        prefix, layout, ring = ctx.settings
        sums = prefix.start_backward(layout.index)
        dq, *_ = drive(backward_steps(dout.contiguous(), q, prefix.key, prefix.value, out, lse, ring, sums))
        dk, dv = (_own_part(total, layout, q.dtype) for total in sums)
        prefix.end_backward(layout.index)
        return dq, dk, dv, None, None, None


def _own_part(total: torch.Tensor, layout: SliceLayout, dtype: torch.dtype) -> torch.Tensor:
    """The slice's rows of a sum over the micro-batch, with zeros for its padding."""
    own = layout.own.take(total)
    part = torch.zeros((layout.num_rows, *own.shape[1:]), dtype=dtype, device=own.device)
    part[: own.shape[0]] = own
    return part
