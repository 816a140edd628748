"""Core attention over documents, rings and slices: the ``core_attention`` of a layer spec."""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig

from bytescale_ext.attention.layouts.slices import SliceLayout
from bytescale_ext.attention.ring import Backend, ring_attention
from bytescale_ext.attention.slices import slice_attention
from megatron.bytescale.core.packed_seq_params import DocumentSeqParams


class DocumentAttention(torch.nn.Module):
    """Causal attention inside each document, over the ranks that share it and its earlier slices.

    ``runtime`` holds the ring communicator and the kernel, both made before the first forward. Each tensor-parallel
    rank runs its own heads in its own ring. The module has no parameters and no state: the layout and the keys and
    values of earlier slices come with ``packed_seq_params``. Recomputation gets them by closure, as the schedule may
    have moved on by then.
    """

    def __init__(
        self, config: TransformerConfig, *, runtime: Any, softmax_scale: float | None = None, **_: Any
    ) -> None:
        super().__init__()
        self.runtime = runtime
        self.scale = softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: DocumentSeqParams | None = None,
    ) -> torch.Tensor:
        """Map query [t, b, heads, dim] and key, value [t, b, kv_heads, dim] to [t, b, heads * dim].

        Documents have a batch of one; samples side by side are laid end to end. Communicates on the ring group.
        """
        params = packed_seq_params
        assert params is not None and params.layout is not None, f"{params=}"
        batch = query.shape[1]
        q, k, v = (tensor.transpose(0, 1).flatten(0, 1).contiguous() for tensor in (query, key, value))
        backend = Backend(self.runtime.comm, self.runtime.kernel, self.scale)
        if isinstance(params.layout, SliceLayout):
            assert params.prefix is not None, f"{params=}"
            out = slice_attention(q, k, v, params.prefix.layer(self), params.layout, backend)
        else:
            out = ring_attention(q, k, v, params.layout, backend)
        return out.flatten(1).unflatten(0, (batch, out.shape[0] // batch)).transpose(0, 1)
