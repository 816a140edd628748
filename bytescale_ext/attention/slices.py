"""Causal attention of a micro-batch that arrives in slices: each slice attends to itself and to all slices before it.

Each slice holds its own keys and values in each layer, and in a ring those that it keeps of other members
(``layouts/slices.py`` has the geometry). They live from the slice's forward pass to its backward pass, like its
activations. Keys that are swapped are on the device only while attention of a slice uses them, and while the layer
before runs, when they are read ahead (``HostPart``).

The backward passes run from the last slice to the first. Each adds its gradients of earlier keys and values to float32
sums, one for each slice, and takes its own sum, which is then complete. Writing a slice twice changes nothing, so
activation recomputation may repeat its forward pass.
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
from bytescale_ext.attention.ring import drive, forward_steps, summing_steps
from bytescale_ext.attention.sink import add_sink_, sink_gradient
from bytescale_ext.attention.travel import Computed, key_sums

type KeysAndValues = tuple[RowParts, RowParts]


class HostPart(Protocol):
    """Keys and values of one slice in one layer that leave the device between their uses (``activation/keys.py``)."""

    def take(self) -> torch.Tensor:
        """Return them on the device, ``[2, rows, kv_heads, dim]``."""
        ...

    def read_ahead(self) -> None:
        """Start reading them for the next use."""
        ...

    def leave(self) -> None:
        """Free their device memory after a use, unless the next use was announced."""
        ...


@dataclass
class KeySwap:
    """How a model chunk swaps keys.

    Attributes:
        to_host: makes a part that may leave the device of keys and values ``[2, rows, kv_heads, dim]`` on it.
        read_next: starts reading the keys of the slice that runs after this one.
        order: the attention modules in the order of their layers, as far as they have run.
    """

    to_host: Callable[[torch.Tensor], HostPart]
    read_next: Callable[[], None]
    order: list[object] = field(default_factory=list)


@dataclass
class LayerPrefix:
    """Keys and values of one micro-batch in one layer, slice by slice.

    Attributes:
        keys: of each slice, keys and values ``[2, rows, kv_heads, dim]``; ``SliceLayout.held`` says which rows.
        swapped: of each slice, those in host memory; ``SliceLayout.swapped`` says which rows.
        sums: of each slice, gradients ``[2, rows, kv_heads, dim]`` in float32 (float64 for float64 keys) that later
            slices have added so far; ``SliceLayout.summed`` says of which rows; empty before the first backward pass.
        to_host: see ``KeySwap``; None where no keys are swapped.
        read_beside: starts reading the keys of the layer above (1) or below (-1).
    """

    keys: list[torch.Tensor] = field(default_factory=list)
    swapped: list[HostPart] = field(default_factory=list)
    sums: list[torch.Tensor] = field(default_factory=list)
    to_host: Callable[[torch.Tensor], HostPart] | None = None
    read_beside: Callable[[int], None] = lambda step: None

    def write(self, layout: SliceLayout, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store a slice's keys and values, leaving room for those that it keeps of other members.

        ``k, v``: ``[t, kv_heads, dim]``, of the slice's tokens.
        """
        assert len(self.keys) in (layout.index, layout.index + 1), f"{len(self.keys)=} {layout.index=}"
        if layout.swapped.places:
            assert self.to_host is not None, "a layout with swapped keys needs a link to host memory"
            self.swapped[layout.index :] = [self.to_host(_empty_part(layout.swapped.places[-1], k))]
        self.keys[layout.index :] = [_empty_part(layout.held.places[-1], k)]
        for held, new in zip(self.keys_of(layout), (k, v), strict=True):
            layout.own.put_(held, new)

    def start_backward(self, layout: SliceLayout) -> KeysAndValues:
        """Return the sums to which a slice adds its gradients; slices run in reverse."""
        if not self.sums:
            self.sums = [key_sums(rows.num_rows, self.keys[0][0]) for rows in layout.summed.places]
        assert len(self.sums) == layout.index + 1, f"{len(self.sums)=} {layout.index=}"
        return _parts(layout.summed, self.sums)

    def end_backward(self) -> None:
        """Free the keys and the sums of the last slice that holds any; swapped keys of the others leave the device."""
        self.keys.pop()
        self.sums.pop()
        if self.swapped:
            self.swapped.pop()
        self.leave()

    def keys_of(self, layout: SliceLayout) -> KeysAndValues:
        """Return the keys and the values of all slices up to this one, on the device."""
        return _parts(layout.keys, [*self.keys, *(part.take() for part in self.swapped)])

    def read_ahead(self) -> None:
        """Start reading swapped keys for their next use."""
        for part in self.swapped:
            part.read_ahead()

    def leave(self) -> None:
        """Free the device memory of swapped keys."""
        for part in self.swapped:
            part.leave()


@dataclass
class MicroBatchPrefix:
    """The keys and values of one micro-batch in all layers of one model chunk.

    Attributes:
        layers: keys and values by attention module.
        swap: how keys are swapped; None: they stay on the device.
    """

    layers: dict[object, LayerPrefix] = field(default_factory=dict)
    swap: KeySwap | None = None

    def layer(self, owner: object) -> LayerPrefix:
        """Return the keys and values in an attention module."""
        if owner not in self.layers:
            self.layers[owner] = LayerPrefix() if self.swap is None else self._swapping_layer(owner, self.swap)
        return self.layers[owner]

    def read_ahead(self, backward: bool) -> None:
        """Start reading the swapped keys of the layer that runs first, forward or backward."""
        for layer in list(self.layers.values())[-1 if backward else 0 :][:1]:
            layer.read_ahead()

    def _swapping_layer(self, owner: object, swap: KeySwap) -> LayerPrefix:
        if owner not in swap.order:
            swap.order.append(owner)
        read_beside = partial(_read_beside, weakref.ref(self), swap.order.index(owner))
        return LayerPrefix(to_host=swap.to_host, read_beside=read_beside)


def _read_beside(of: weakref.ref[MicroBatchPrefix], number: int, step: int) -> None:
    """Start reading the keys of the layer above (1) or below (-1) layer ``number``, or those of the next slice."""
    micro_batch = of()
    assert micro_batch is not None and micro_batch.swap is not None
    order = micro_batch.swap.order
    if not 0 <= number + step < len(order):
        micro_batch.swap.read_next()
    elif order[number + step] in micro_batch.layers:
        micro_batch.layers[order[number + step]].read_ahead()


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
    backend.check(q, k, v, layout.num_rows)
    settings = _Settings(prefix, layout, backend)
    out: torch.Tensor = _SliceAttention.apply(  # type: ignore[no-untyped-call]  # torch's, without annotations
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


class _SliceAttention(torch.autograd.Function):
    """Saves the slice's queries, output and log-sum-exp; keys and values stay in the prefix."""

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
        num_tokens, is_repeated = layout.own.num_rows, len(prefix.keys) > layout.index
        prefix.write(layout, k[:num_tokens], v[:num_tokens])
        keys, values = prefix.keys_of(layout)
        if not is_repeated:
            prefix.read_beside(1)
        out, lse = drive(forward_steps(q, keys, values, layout.attention, backend))
        if not is_repeated:  # else the backward pass follows and uses them again
            prefix.leave()
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
        computed = Computed(q, *prefix.keys_of(layout), out, lse)
        prefix.read_beside(-1)
        dq = drive(summing_steps(dout.contiguous(), computed, sums, layout.attention, backend))
        dk, dv = (_own_part(total, layout, q.dtype) for total in sums)
        prefix.end_backward()
        of_sink = sink_gradient(dout, out, lse, backend.sink)
        return dq, dk, dv, None, of_sink, backend.expansion_gradient()


def _empty_part(rows: Rows, keys: torch.Tensor) -> torch.Tensor:
    """Return room ``[2, rows, kv_heads, dim]`` for keys and values like ``keys [t, kv_heads, dim]``."""
    return keys.new_empty((2, rows.num_rows, *keys.shape[1:]))


def _parts(rows: PartRows, held: list[torch.Tensor]) -> KeysAndValues:
    """Return the keys and the values among ``held``, ``[2, rows, kv_heads, dim]`` of each slice."""
    return RowParts(rows, [part[0] for part in held]), RowParts(rows, [part[1] for part in held])


def _own_part(total: RowParts, layout: SliceLayout, dtype: torch.dtype) -> torch.Tensor:
    """Return the slice's rows ``[t, kv_heads, dim]`` of a sum ``[tk, kv_heads, dim]``; padding rows are zero."""
    own = layout.own.take(total)
    part = torch.zeros((layout.num_rows, *own.shape[1:]), dtype=dtype, device=own.device)
    part[: own.shape[0]] = own
    return part
