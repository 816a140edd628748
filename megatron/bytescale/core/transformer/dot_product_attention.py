"""Core attention over documents and rings: the module that takes ``core_attention``'s place in a layer spec."""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig

from bytescale_ext.attention.ring import ring_attention
from megatron.bytescale.core.packed_seq_params import DocumentSeqParams


class DocumentAttention(torch.nn.Module):
    """Causal attention inside each document, over the ranks that share it.

    ``runtime`` gives the ring communicator and the kernel, both made before the first forward. The heads are this
    tensor-parallel rank's own; tensor-parallel ranks run their rings side by side.
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
        """query [t, 1, heads, dim]; key, value [t, 1, kv_heads, dim] -> [t, 1, heads * dim].

        Communicates on the ring group. The layout comes with ``packed_seq_params``, by closure also into
        recomputation, where the schedule may already be at another micro-batch.
        """
        assert packed_seq_params is not None and packed_seq_params.layout is not None, f"{packed_seq_params=}"
        out = ring_attention(
            query.squeeze(1),
            key.squeeze(1),
            value.squeeze(1),
            packed_seq_params.layout,
            self.runtime.comm,
            self.runtime.kernel,
            self.scale,
        )
        return out.reshape(out.shape[0], 1, -1)
