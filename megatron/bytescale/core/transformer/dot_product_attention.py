"""Core attention over documents, rings and slices: the module that takes ``core_attention``'s place in a layer spec."""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig

from bytescale_ext.attention.prefix_kv import slice_attention
from bytescale_ext.attention.ring import ring_attention
from bytescale_ext.attention.slice_layout import SliceLayout
from megatron.bytescale.core.packed_seq_params import DocumentSeqParams


class DocumentAttention(torch.nn.Module):
    """Causal attention inside each document, over the ranks that share it and the slices before.

    ``runtime`` gives the ring communicator and the kernel, both made before the first forward. The heads are this
    tensor-parallel rank's own; tensor-parallel ranks run their rings side by side. It has no parameters and no state:
    the layout, and what was computed for earlier slices, come with ``packed_seq_params``, by closure also into
    recomputation, where the schedule may already be elsewhere.
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
        """query [t, b, heads, dim]; key, value [t, b, kv_heads, dim] -> [t, b, heads * dim].

        Documents have a batch of one; samples side by side are laid end to end. Communicates on the ring group.
        """
        params = packed_seq_params
        assert params is not None and params.layout is not None, f"{params=}"
        batch = query.shape[1]
        q, k, v = (tensor.transpose(0, 1).flatten(0, 1).contiguous() for tensor in (query, key, value))
        means = (self.runtime.comm, self.runtime.kernel, self.scale)
        if isinstance(params.layout, SliceLayout):
            assert params.prefix is not None, f"{params=}"
            out = slice_attention(q, k, v, params.prefix.layer(self, k, v), params.layout, *means)
        else:
            out = ring_attention(q, k, v, params.layout, *means)
        return out.flatten(1).unflatten(0, (batch, out.shape[0] // batch)).transpose(0, 1)
