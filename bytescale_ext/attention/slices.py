"""Causal attention of a micro-batch that arrives in slices: each slice attends to itself and to all slices before it.

Each slice holds its own keys and values in each layer, and in a ring those that it keeps of other members
(``layouts/slices.py`` has the geometry). They live from the slice's forward pass to its backward pass, like its
activations.

The backward passes run from the last slice to the first. Each adds its gradients of earlier keys and values to float32
sums, one for each slice, and takes its own sum, which is then complete. Writing a slice twice changes nothing, so
activation recomputation may repeat its forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from bytescale_ext.attention.layouts.rows import PartRows, RowParts
from bytescale_ext.attention.layouts.slices import SliceLayout
from bytescale_ext.attention.ring import Backend, check_tensors, drive, forward_steps, summing_steps
from bytescale_ext.attention.travel import Computed, key_sums

type KeysAndValues = tuple[RowParts, RowParts]


@dataclass
class LayerPrefix:
    """Keys and values of one micro-batch in one layer, slice by slice.

    Attributes:
        keys: of each slice, keys and values ``[2, rows, kv_heads, dim]``; ``SliceLayout.held`` says which rows.
        sums: of each slice, gradients ``[2, rows, kv_heads, dim]`` in float32 (float64 for float64 keys) that later
            slices have added so far; ``SliceLayout.summed`` says of which rows; empty before the first backward pass.
    """

    keys: list[torch.Tensor] = field(default_factory=list)
    sums: list[torch.Tensor] = field(default_factory=list)

    def write(self, layout: SliceLayout, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store a slice's keys and values, leaving room for those that it keeps of other members.

        ``k, v``: ``[t, kv_heads, dim]``, of the slice's tokens.
        """
        assert len(self.keys) in (layout.index, layout.index + 1), f"{len(self.keys)=} {layout.index=}"
        part = k.new_empty((2, layout.held.places[-1].num_rows, *k.shape[1:]))
        self.keys[layout.index :] = [part]
        for held, new in zip(_parts(layout.held, self.keys), (k, v), strict=True):
            layout.own.put_(held, new)

    def start_backward(self, layout: SliceLayout) -> KeysAndValues:
        """Return the sums to which a slice adds its gradients; slices run in reverse."""
        if not self.sums:
            self.sums = [key_sums(rows.num_rows, self.keys[0][0]) for rows in layout.summed.places]
        assert len(self.sums) == layout.index + 1, f"{len(self.sums)=} {layout.index=}"
        return _parts(layout.summed, self.sums)

    def end_backward(self) -> None:
        """Free the keys and the sums of the last slice that holds any."""
        self.keys.pop()
        self.sums.pop()

    def keys_of(self, layout: SliceLayout) -> KeysAndValues:
        """Return the keys and the values of all slices up to this one."""
        return _parts(layout.held, self.keys)


@dataclass
class MicroBatchPrefix:
    """The keys and values of one micro-batch in all layers of one model chunk.

    Attributes:
        layers: keys and values by attention module.
    """

    layers: dict[object, LayerPrefix] = field(default_factory=dict)

    def layer(self, owner: object) -> LayerPrefix:
        """Return the keys and values in an attention module."""
        return self.layers.setdefault(owner, LayerPrefix())


def slice_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, prefix: LayerPrefix, layout: SliceLayout, backend: Backend
) -> torch.Tensor:
    """Return the attention of one slice over itself and everything before it, differentiable once.

    Communicates on the ring group, like ``ring_attention``.

    Args:
        q: ``[t, heads, dim]``, of the slice; ``t == layout.num_rows``.
        k, v: ``[t, kv_heads, dim]``, the dtype of ``q``.
        prefix: the layer's keys and values of all earlier slices.
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
    """Saves the slice's queries, output and log-sum-exp; keys and values stay in the prefix."""

    @staticmethod
    def forward(ctx: _SliceCtx, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, settings: _Settings) -> torch.Tensor:
        """Return ``out [t, heads, dim]``; shapes as in ``slice_attention``."""
        prefix, layout, backend = settings
        num_tokens = layout.own.num_rows
        prefix.write(layout, k[:num_tokens], v[:num_tokens])
        keys, values = prefix.keys_of(layout)
        out, lse = drive(forward_steps(q, keys, values, layout.attention, backend))
        ctx.save_for_backward(q, out, lse)
        ctx.settings = settings
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: _SliceCtx, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return ``dq, dk, dv`` of the shapes of ``q, k, v``; ``dout``: ``[t, heads, dim]``."""
        q, out, lse = ctx.saved_tensors
        prefix, layout, backend = ctx.settings
        sums = prefix.start_backward(layout)
        computed = Computed(q, *prefix.keys_of(layout), out, lse)
        dq = drive(summing_steps(dout.contiguous(), computed, sums, layout.attention, backend))
        dk, dv = (_own_part(total, layout, q.dtype) for total in sums)
        prefix.end_backward()
        return dq, dk, dv, None


def _parts(rows: PartRows, held: list[torch.Tensor]) -> KeysAndValues:
    """Return the keys and the values among ``held``, ``[2, rows, kv_heads, dim]`` of each slice."""
    return RowParts(rows, [part[0] for part in held]), RowParts(rows, [part[1] for part in held])


def _own_part(total: RowParts, layout: SliceLayout, dtype: torch.dtype) -> torch.Tensor:
    """Return the slice's rows ``[t, kv_heads, dim]`` of a sum ``[tk, kv_heads, dim]``; padding rows are zero."""
    own = layout.own.take(total)
    part = torch.zeros((layout.num_rows, *own.shape[1:]), dtype=dtype, device=own.device)
    part[: own.shape[0]] = own
    return part
