"""Core attention of a slice over its micro-batch: the module that takes ``core_attention``'s place in a layer spec."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig

from bytescale_ext.attention.prefix_kv import MicroBatchPrefix, SlicePlace, prefix_attention
from megatron.bytescale.core.packed_seq_params import DocumentSeqParams


@dataclass
class SliceSeqParams(DocumentSeqParams):
    """What the layers must know of a slice; ``positions`` are its tokens' in the whole sequence.

    Attributes:
        place: which tokens of the micro-batch the slice is.
        prefix: keys and values of the micro-batch in the layers of this model chunk.
    """

    place: SlicePlace | None = None
    prefix: MicroBatchPrefix | None = None


class SliceAttention(torch.nn.Module):
    """Causal attention of a slice to itself and to the slices before it.

    ``runtime`` gives the kernel, chosen before the first forward. The heads are this tensor-parallel rank's own. It
    has no parameters and no state: what was computed for earlier slices comes with ``packed_seq_params``, by closure
    also into recomputation, where the schedule may already be at another slice.
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
        packed_seq_params: SliceSeqParams | None = None,
    ) -> torch.Tensor:
        """query [n, b, heads, dim]; key, value [n, b, kv_heads, dim] -> [n, b, heads * dim]. No communication."""
        params = packed_seq_params
        assert params is not None and params.prefix is not None and params.place is not None, f"{params=}"
        prefix = params.prefix.layer(self, key, value)
        out = prefix_attention(query, key, value, prefix, params.place, self.runtime.kernel, self.scale)
        return out.flatten(2)
