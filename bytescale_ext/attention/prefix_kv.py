"""Causal attention of a sequence that arrives in slices: each slice attends to itself and to all slices before it.

Keys and values of earlier slices lie in one buffer for each micro-batch and layer; a slice writes its own part and
reads what is before it. A slice is two blocks, joined by their log-sum-exp, so a kernel needs no mask of its own::

                    keys   0          start     stop
    queries start..stop    | rectangle | triangle |

The backward passes run from the last slice to the first. Each adds its gradients of earlier keys and values to a
float32 buffer, from which the earlier slice takes its own. Writing a slice twice changes nothing, so activation
recomputation may run a slice's forward pass as often as it likes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from bytescale_ext.attention.kernels import Kernel
from bytescale_ext.attention.layout import CuSeqlens
from bytescale_ext.attention.merge import merge_
from bytescale_ext.plan.slices import SliceRange

Tensors2 = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class SlicePlace:
    """Where a slice lies in its micro-batch, for sequences of ``batch`` samples side by side."""

    part: SliceRange
    batch: int = 1

    @cached_property
    def own(self) -> CuSeqlens:
        """Offsets of the samples' rows in the slice."""
        return CuSeqlens(tuple(self.part.num_tokens * index for index in range(self.batch + 1)))

    @cached_property
    def before(self) -> CuSeqlens:
        """Offsets of the samples' rows before the slice."""
        return CuSeqlens(tuple(self.part.start * index for index in range(self.batch + 1)))


@dataclass
class LayerPrefix:
    """Keys and values of one micro-batch in one layer.

    Attributes:
        key, value: [batch, seq, kv_heads, dim], written slice by slice.
        key_grad, value_grad: the same shape in float32 (float64 for float64 keys): what later slices have added for
            earlier keys and values; None before the first backward pass.
        next_backward: index of the slice whose backward pass is due, or None before the last slice's.
    """

    key: torch.Tensor
    value: torch.Tensor
    key_grad: torch.Tensor | None = None
    value_grad: torch.Tensor | None = None
    next_backward: int | None = None

    def start_backward(self, part: SliceRange) -> None:
        """Note that a slice's gradients are computed now; they come from the last slice to the first."""
        if self.next_backward is None:
            precise = torch.promote_types(self.key.dtype, torch.float32)
            self.key_grad = torch.zeros_like(self.key, dtype=precise)
            self.value_grad = torch.zeros_like(self.value, dtype=precise)
            self.next_backward = part.index
        assert self.next_backward == part.index, f"{self.next_backward=} {part=}"
        self.next_backward -= 1


@dataclass
class MicroBatchPrefix:
    """The prefix of one micro-batch in all layers of one model chunk, kept from its first forward to its last use.

    Attributes:
        seq_length: tokens of the whole micro-batch.
        layers: by the attention module that wrote it.
    """

    seq_length: int
    layers: dict[Any, LayerPrefix] = field(default_factory=dict)

    def layer(self, owner: Any, key: torch.Tensor, value: torch.Tensor) -> LayerPrefix:
        """The buffers of a layer, allocated for its first slice. ``key``, ``value``: [n, batch, heads, dim]."""
        if owner not in self.layers:
            whole = (key.shape[1], self.seq_length, *key.shape[2:])
            wide = (value.shape[1], self.seq_length, *value.shape[2:])
            self.layers[owner] = LayerPrefix(key.new_empty(whole), value.new_empty(wide))
        return self.layers[owner]

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers."""
        tensors = [
            t for layer in self.layers.values() for t in (layer.key, layer.value, layer.key_grad, layer.value_grad)
        ]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)


def prefix_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    prefix: LayerPrefix,
    place: SlicePlace,
    kernel: Kernel,
    scale: float,
) -> torch.Tensor:
    """Attention of one slice over itself and everything before it, with gradients. No communication.

    Args:
        query: [n, batch, heads, dim], the slice's.
        key, value: [n, batch, kv_heads, dim].
        prefix: the layer's buffers; all earlier slices have been written.
        place: which tokens of the micro-batch the slice is; ``place.batch`` is the batch.
        kernel: of ``bytescale_ext.attention.kernels``.
        scale: of the scores.

    Returns:
        [n, batch, heads, dim]
    """
    out: torch.Tensor = _PrefixAttention.apply(query, key, value, prefix, place, kernel, scale)
    return out


class _PrefixAttention(torch.autograd.Function):
    """Saves the slice's queries, output and log-sum-exp; keys and values stay in the buffer."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        prefix: LayerPrefix,
        place: SlicePlace,
        kernel: Kernel,
        scale: float,
    ) -> torch.Tensor:
        part, batch = place.part, place.batch
        assert query.shape[:2] == (part.num_tokens, batch), f"{query.shape=} {place=}"
        prefix.key[:, part.start : part.stop] = key.transpose(0, 1)
        prefix.value[:, part.start : part.stop] = value.transpose(0, 1)
        queries = _packed(query)
        own = _rows(prefix, part.start, part.stop)
        out, lse = kernel.forward(queries, *own, place.own, place.own, True, scale)
        if part.start:
            before = _rows(prefix, 0, part.start)
            total = out.to(lse.dtype)
            merge_(total, lse, *kernel.forward(queries, *before, place.own, place.before, False, scale))
            out = total.to(query.dtype)
        ctx.save_for_backward(queries, out, lse)
        ctx.settings = (prefix, place, kernel, scale)
        return _unpacked(out, batch)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (out_grad,) = grads
        queries, out, lse = ctx.saved_tensors
        prefix, place, kernel, scale = ctx.settings
        part, batch = place.part, place.batch
        prefix.start_backward(part)
        saved = (_packed(out_grad), queries)
        own = _rows(prefix, part.start, part.stop)
        dq, dk, dv = kernel.backward(*saved, *own, out, lse, place.own, place.own, True, scale)
        if part.start:
            before = _rows(prefix, 0, part.start)
            dq_before, *earlier = kernel.backward(*saved, *before, out, lse, place.own, place.before, False, scale)
            dq = dq + dq_before
            for total, grad in zip((prefix.key_grad, prefix.value_grad), earlier, strict=True):
                total[:, : part.start] += grad.unflatten(0, (batch, part.start))
        key_grad, value_grad = (
            (grad.unflatten(0, (batch, part.num_tokens)) + total[:, part.start : part.stop]).to(queries.dtype)
            for grad, total in ((dk, prefix.key_grad), (dv, prefix.value_grad))
        )
        if not part.index:
            prefix.key_grad = prefix.value_grad = prefix.next_backward = None
        return _unpacked(dq, batch), key_grad.transpose(0, 1), value_grad.transpose(0, 1), None, None, None, None


def _packed(tensor: torch.Tensor) -> torch.Tensor:
    """[n, batch, heads, dim] as [batch * n, heads, dim], sequence after sequence; no copy for a batch of one."""
    return tensor.transpose(0, 1).flatten(0, 1).contiguous()


def _unpacked(tensor: torch.Tensor, batch: int) -> torch.Tensor:
    """The inverse of ``_packed``."""
    return tensor.unflatten(0, (batch, tensor.shape[0] // batch)).transpose(0, 1)


def _rows(prefix: LayerPrefix, start: int, stop: int) -> Tensors2:
    """Keys and values of tokens [start, stop): [batch * n, kv_heads, dim]; no copy for a batch of one."""
    return prefix.key[:, start:stop].flatten(0, 1), prefix.value[:, start:stop].flatten(0, 1)
