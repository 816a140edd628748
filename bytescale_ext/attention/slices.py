"""Causal attention of a micro-batch that arrives in slices: each slice attends to itself and to all slices before it.

For each layer, the keys and values of a micro-batch lie in one buffer. A slice writes its own rows and reads the rows
of all slices up to it: this rank's and, in a ring, other members' (``layouts/slices.py`` has the geometry).

The backward passes run from the last slice to the first. Each adds its gradients of keys and values to a float32
buffer, from which every slice reads its own rows when its turn comes. Writing a slice twice changes nothing, so
activation recomputation may repeat its forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from bytescale_ext.attention.kernels.contract import Saved, accumulation_dtype
from bytescale_ext.attention.layouts.slices import SliceLayout
from bytescale_ext.attention.ring import Backend, backward_steps, check_tensors, drive, forward_steps


@dataclass
class LayerPrefix:
    """Keys and values of one micro-batch in one layer.

    Attributes:
        key, value: ``[num_keys, kv_heads, dim]``, written slice by slice.
        sums: gradients of keys and of values that slices have added so far, each of the same shape in float32
            (float64 for float64 keys); None before the first backward pass and after the last.
        next_backward: index of the slice whose backward pass must come next, or None before the last slice's.
    """

    key: torch.Tensor
    value: torch.Tensor
    sums: tuple[torch.Tensor, torch.Tensor] | None = None
    next_backward: int | None = None

    def start_backward(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sums ``[num_keys, kv_heads, dim]`` to which slice ``index`` adds; slices run in reverse."""
        if self.sums is None:
            precise = accumulation_dtype(self.key.dtype)
            self.sums = torch.zeros_like(self.key, dtype=precise), torch.zeros_like(self.value, dtype=precise)
            self.next_backward = index
        assert self.next_backward == index, f"{self.next_backward=} {index=}"
        self.next_backward -= 1
        return self.sums

    def end_backward(self, index: int) -> None:
        """Free the sums after slice 0, whose backward pass is the last."""
        if not index:
            self.sums = self.next_backward = None


@dataclass
class MicroBatchPrefix:
    """The prefix of one micro-batch in all layers of one model chunk, kept from its first forward to its last use.

    Attributes:
        num_keys: rows of the whole micro-batch.
        layers: the buffers of each attention module.
    """

    num_keys: int
    layers: dict[object, LayerPrefix] = field(default_factory=dict)

    def layer(self, owner: object, key: torch.Tensor, value: torch.Tensor) -> LayerPrefix:
        """Return the buffers of a layer, allocated for its first slice. ``key, value``: ``[t, kv_heads, dim]``."""
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
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, prefix: LayerPrefix, layout: SliceLayout, backend: Backend
) -> torch.Tensor:
    """Return the attention of one slice over itself and everything before it, differentiable once.

    Communicates on the ring group, like ``ring_attention``.

    Args:
        q: ``[t, heads, dim]``, of the slice; ``t == layout.num_rows``.
        k, v: ``[t, kv_heads, dim]``, the dtype of ``q``.
        prefix: the layer's buffers; all earlier slices have been written.
        layout: the rows of this rank.
        backend: how to compute and exchange.

    Returns:
        ``[t, heads, dim]`` in the dtype of ``q``. Padding rows are zero, as are their gradients.

    Raises:
        ValueError: the tensors do not fit the layout or each other.
        RuntimeError: from the communication backend when a peer has died.
    """
    check_tensors(q, k, v, layout.num_rows)
    out: torch.Tensor = _SliceAttention.apply(q, k, v, _Settings(prefix, layout, backend))
    return out


class _Settings(NamedTuple):
    prefix: LayerPrefix
    layout: SliceLayout
    backend: Backend


class _SliceCtx(torch.autograd.function.FunctionCtx):
    saved_tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    settings: _Settings


class _SliceAttention(torch.autograd.Function):
    """Saves the slice's queries, output and log-sum-exp; keys and values stay in the buffer."""

    @staticmethod
    def forward(ctx: _SliceCtx, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, settings: _Settings) -> torch.Tensor:
        """Return ``out [t, heads, dim]``; shapes as in ``slice_attention``."""
        prefix, layout, backend = settings
        num_tokens = layout.own.num_rows
        layout.own.put_(prefix.key, k[:num_tokens])
        layout.own.put_(prefix.value, v[:num_tokens])
        out, lse = drive(forward_steps(q, prefix.key, prefix.value, layout.attention, backend))
        ctx.save_for_backward(q, out, lse)
        ctx.settings = settings
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: _SliceCtx, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return ``dq, dk, dv`` of the shapes of ``q, k, v``; ``dout``: ``[t, heads, dim]``."""
        q, out, lse = ctx.saved_tensors
        prefix, layout, backend = ctx.settings
        sums = prefix.start_backward(layout.index)
        saved = Saved(q, prefix.key, prefix.value, out, lse)
        dq, *_ = drive(backward_steps(dout.contiguous(), saved, layout.attention, backend, sums))
        dk, dv = (_own_part(total, layout, q.dtype) for total in sums)
        prefix.end_backward(layout.index)
        return dq, dk, dv, None


def _own_part(total: torch.Tensor, layout: SliceLayout, dtype: torch.dtype) -> torch.Tensor:
    """Return the slice's rows ``[t, kv_heads, dim]`` of a sum ``[num_keys, kv_heads, dim]``; padding rows are zero."""
    own = layout.own.take(total)
    part = torch.zeros((layout.num_rows, *own.shape[1:]), dtype=dtype, device=own.device)
    part[: own.shape[0]] = own
    return part
