"""Causal attention of a micro-batch in slices: each slice attends to itself and to all earlier slices.

Each slice stores its own keys and values in each layer. In a ring it also stores the keys and values that it keeps of
other members (``layouts/slices.py`` has the geometry). They live from the slice's forward pass to its backward pass,
like its activations. Swapped keys (``SwappablePart``) are on the device only while the attention of a slice uses them.
They are read ahead while the previous layer runs.

The backward passes run from the last slice to the first. Each backward pass adds gradients of the keys and values of
earlier slices to float32 sums, one sum per slice. The sum of its own slice is then complete. Writing a slice twice
changes nothing, so activation recomputation may repeat the forward pass of a slice.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol

import torch

from bytescale_ext.attention.backend import Backend
from bytescale_ext.attention.layouts.rows import PartRows, RowParts, Rows
from bytescale_ext.attention.layouts.slices import SliceLayout
from bytescale_ext.attention.ring import attention_backward_into, attention_forward, drive
from bytescale_ext.attention.sink import add_sink_, sink_gradient
from bytescale_ext.attention.travel import ForwardResult, key_sums

type KeyValueParts = tuple[RowParts, RowParts]
type KeysAndValues = tuple[torch.Tensor, torch.Tensor]


class SwappablePart(Protocol):
    """Keys and values of one slice in one layer that leave the device between uses (``activation/keys.py``)."""

    def take(self) -> torch.Tensor:
        """Return keys and values ``[2, rows, kv_heads, dim]`` on the device."""
        ...

    def read_ahead(self) -> None:
        """Start reading the keys back for the next use."""
        ...

    def release(self) -> None:
        """Free the device memory after a use, unless ``read_ahead`` announced the next use."""
        ...


@dataclass
class KeySwap:
    """Swapping of keys in a model chunk.

    Attributes:
        to_host: function that makes a swappable part of keys and values ``[2, rows, kv_heads, dim]`` on the device.
        read_next: function that starts reading the keys of the next slice.
        order: attention modules in the order of their layers, as far as they have run.
    """

    to_host: Callable[[torch.Tensor], SwappablePart]
    read_next: Callable[[], None]
    order: list[object] = field(default_factory=list)


@dataclass
class LayerPrefix:
    """Keys and values of one micro-batch in one layer, slice by slice.

    Attributes:
        keys: keys and values ``[rows, kv_heads, dim]`` of each slice on the device; ``SliceLayout.held`` has the rows.
        swapped: swappable keys and values of each slice; ``SliceLayout.swapped`` has the rows.
        sums: gradients ``[rows, kv_heads, dim]`` of each slice's keys and values that later slices have added so far,
            in float32 (float64 for float64 keys); ``SliceLayout.summed`` has the rows. Empty before the first backward
            pass.
        to_host: see ``KeySwap``; None if no keys are swapped.
        read_adjacent: function that starts reading the keys of the layer above (1) or below (-1).
    """

    keys: list[KeysAndValues] = field(default_factory=list)
    swapped: list[SwappablePart] = field(default_factory=list)
    sums: list[KeysAndValues] = field(default_factory=list)
    to_host: Callable[[torch.Tensor], SwappablePart] | None = None
    read_adjacent: Callable[[int], None] = lambda step: None

    def write(self, layout: SliceLayout, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store the keys and values of a slice, and make room for the keys that it keeps of other members.

        ``k, v``: ``[t, kv_heads, dim]``, of the slice's tokens.
        """
        assert len(self.keys) in (layout.index, layout.index + 1), f"{len(self.keys)=} {layout.index=}"
        if layout.swapped.places:
            assert self.to_host is not None, "a layout with swapped keys needs a link to host memory"
            self.swapped[layout.index :] = [self.to_host(_empty_part(layout.swapped.places[-1], k))]
        self.keys[layout.index :] = [_separated(_empty_part(layout.held.places[-1], k))]
        for held, new in zip(self.keys_of(layout), (k, v), strict=True):
            layout.own.put_(held, new)

    def start_backward(self, layout: SliceLayout) -> KeyValueParts:
        """Return the sums to which the backward pass of a slice adds its gradients. Slices run in reverse order."""
        if not self.sums:
            example = self.keys[0][0]
            self.sums = [_separated(key_sums(rows.num_rows, example)) for rows in layout.summed.places]
        assert len(self.sums) == layout.index + 1, f"{len(self.sums)=} {layout.index=}"
        return _parts(layout.summed, self.sums)

    def end_backward(self) -> None:
        """Free the keys and sums of the last remaining slice, and the device memory of all swapped keys."""
        self.keys.pop()
        self.sums.pop()
        if self.swapped:
            self.swapped.pop()
        self.release()

    def keys_of(self, layout: SliceLayout) -> KeyValueParts:
        """Return the keys and the values of all slices up to the slice of ``layout``, on the device."""
        return _parts(layout.keys, [*self.keys, *(_separated(part.take()) for part in self.swapped)])

    def read_ahead(self) -> None:
        """Start reading all swapped keys back for their next use."""
        for part in self.swapped:
            part.read_ahead()

    def release(self) -> None:
        """Free the device memory of all swapped keys, unless ``read_ahead`` announced their next use."""
        for part in self.swapped:
            part.release()


@dataclass
class MicroBatchPrefix:
    """Keys and values of one micro-batch in all layers of one model chunk.

    Attributes:
        layers: keys and values by attention module and depth; a repeated layer runs once at each depth.
        swap: swapping of keys; None if they stay on the device.
    """

    layers: dict[object, LayerPrefix] = field(default_factory=dict)
    swap: KeySwap | None = None

    def layer(self, owner: object) -> LayerPrefix:
        """Return the keys and values of an attention module at a depth."""
        if owner not in self.layers:
            self.layers[owner] = LayerPrefix() if self.swap is None else self._swapping_layer(owner, self.swap)
        return self.layers[owner]

    def read_ahead(self, backward: bool) -> None:
        """Start reading the swapped keys of the first layer of a forward or backward pass."""
        for layer in list(self.layers.values())[-1 if backward else 0 :][:1]:
            layer.read_ahead()

    def _swapping_layer(self, owner: object, swap: KeySwap) -> LayerPrefix:
        if owner not in swap.order:
            swap.order.append(owner)
        read_adjacent = partial(_read_adjacent, weakref.ref(self), swap.order.index(owner))
        return LayerPrefix(to_host=swap.to_host, read_adjacent=read_adjacent)


def _read_adjacent(reference: weakref.ref[MicroBatchPrefix], number: int, step: int) -> None:
    """Start reading the keys of the layer above (1) or below (-1) layer ``number``, or of the next slice at the end."""
    micro_batch = reference()
    assert micro_batch is not None and micro_batch.swap is not None
    order = micro_batch.swap.order
    if not 0 <= number + step < len(order):
        micro_batch.swap.read_next()
    elif order[number + step] in micro_batch.layers:
        micro_batch.layers[order[number + step]].read_ahead()


def slice_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, prefix: LayerPrefix, layout: SliceLayout, backend: Backend
) -> torch.Tensor:
    """Return the causal attention of one slice over itself and all earlier slices, differentiable once.

    Communicates on the ring group, like ``ring_attention``.

    Args:
        q: queries of the slice, ``[t, heads, dim]``; ``t == layout.num_rows``.
        k, v: keys and values of the slice, ``[t, kv_heads, dim]``, in the dtype of ``q``.
        prefix: the layer's keys and values of all earlier slices; the keys and values of this slice are added.
        layout: attention layout of the slice on this rank.
        backend: kernel and communication.

    Returns:
        ``[t, heads, dim]`` in the dtype of ``q``. Padding rows and their gradients are zero.

    Raises:
        ValueError: the shapes or dtypes of the tensors do not fit the layout or each other.
        PeerLost: the connection to a peer is lost.
    """
    backend.check(q, k, v, layout.num_rows, travels=True)
    settings = _Settings(prefix, layout, backend)
    out: torch.Tensor = SliceAttention.apply(  # type: ignore[no-untyped-call]  # torch's, without annotations
        q, k, v, settings, *backend.weights
    )
    return out


class _Settings(NamedTuple):
    prefix: LayerPrefix
    layout: SliceLayout
    backend: Backend


class _SliceCtx(torch.autograd.function.FunctionCtx):
    saved_tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    settings: _Settings


class SliceAttention(torch.autograd.Function):
    """Autograd function of a slice. Saves queries, output and log-sum-exp; keys and values stay in the prefix."""

    @staticmethod
    def forward(
        ctx: _SliceCtx,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        settings: _Settings,
        *weights: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return ``out [t, heads, dim]``; shapes as in ``slice_attention``; ``weights``: ``Backend.weights``."""
        prefix, layout, backend = settings
        own, is_repeated = Rows.of([(0, layout.own.num_rows)]), len(prefix.keys) > layout.index
        prefix.write(layout, own.take(k), own.take(v))
        keys, values = prefix.keys_of(layout)
        if not is_repeated:
            prefix.read_adjacent(1)
        out, lse = drive(attention_forward(q, keys, values, layout.attention, backend))
        if not is_repeated:  # after a recomputation the backward pass follows and uses the keys again
            prefix.release()
        if weights[0] is not None:
            add_sink_(out, lse, weights[0])
        ctx.save_for_backward(q, out, lse)
        ctx.settings = settings
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: _SliceCtx, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of ``q, k, v`` and the weights, of their shapes; ``dout``: ``[t, heads, dim]``."""
        q, out, lse = ctx.saved_tensors
        prefix, layout, backend = ctx.settings.prefix, ctx.settings.layout, ctx.settings.backend.for_backward()
        sums = prefix.start_backward(layout)
        computed = ForwardResult(q, *prefix.keys_of(layout), out, lse)
        prefix.read_adjacent(-1)
        dq = drive(attention_backward_into(dout.contiguous(), computed, sums, layout.attention, backend))
        dk, dv = (_own_part(total, layout, q.dtype) for total in sums)
        prefix.end_backward()
        dsink = sink_gradient(dout, out, lse, backend.sink)
        return dq, dk, dv, None, dsink, backend.expansion_gradient()


def _empty_part(rows: Rows, keys: torch.Tensor) -> torch.Tensor:
    """Return uninitialized memory ``[2, rows, kv_heads, dim]`` for keys and values like ``keys [t, kv_heads, dim]``."""
    return keys.new_empty((2, rows.num_rows, *keys.shape[1:]))


def _separated(both: torch.Tensor) -> KeysAndValues:
    """Return views of the keys and of the values in ``both [2, rows, kv_heads, dim]``."""
    keys, values = both.unbind()
    return keys, values


def _parts(rows: PartRows, parts: list[KeysAndValues]) -> KeyValueParts:
    """Return the keys and the values of all parts, each ``[rows, kv_heads, dim]``."""
    return RowParts(rows, [keys for keys, _ in parts]), RowParts(rows, [values for _, values in parts])


def _own_part(total: RowParts, layout: SliceLayout, dtype: torch.dtype) -> torch.Tensor:
    """Return the slice's own rows ``[t, kv_heads, dim]`` of a sum ``[tk, kv_heads, dim]``. Padding rows are zero."""
    own = layout.own.take(total)
    if len(own) == layout.num_rows:
        return own.to(dtype)
    part = torch.zeros((layout.num_rows, *own.shape[1:]), dtype=dtype, device=own.device)
    part[: own.shape[0]] = own
    return part
