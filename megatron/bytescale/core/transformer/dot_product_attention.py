"""Core attention over documents, rings, slices and samples: the ``core_attention`` of a layer spec."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig

from bytescale_ext.attention.layouts.layout import AttentionLayout
from bytescale_ext.attention.layouts.rows import CuSeqlens, Rows
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

    def params_of(self, num_tokens: int, batch: int) -> DocumentSeqParams:
        """Return the layout of samples without documents: here there is none."""
        raise AssertionError("documents come with packed_seq_params")

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
        batch = query.shape[1]
        params = packed_seq_params or self.params_of(query.shape[0], batch)
        assert params.layout is not None, f"{params=}"
        q, k, v = (tensor.transpose(0, 1).flatten(0, 1).contiguous() for tensor in (query, key, value))
        backend = Backend(self.runtime.comm, self.runtime.kernel, self.scale)
        if isinstance(params.layout, SliceLayout):
            assert params.prefix is not None, f"{params=}"
            out = slice_attention(q, k, v, params.prefix.layer(self), params.layout, backend)
        else:
            out = ring_attention(q, k, v, params.layout, backend)
        return out.flatten(1).unflatten(0, (batch, out.shape[0] // batch)).transpose(0, 1)


class SampleAttention(DocumentAttention):
    """Causal attention inside each of Megatron's samples, by a kernel that does not keep the scores.

    Megatron's local attention keeps the scores of every pair of tokens for the backward pass.
    """

    def params_of(self, num_tokens: int, batch: int) -> DocumentSeqParams:
        """Return the layout of ``batch`` samples of ``num_tokens`` tokens."""
        return DocumentSeqParams(layout=sample_layout(num_tokens, batch))


@lru_cache(maxsize=16)
def sample_layout(num_tokens: int, batch: int) -> AttentionLayout:
    """Return the layout of ``batch`` samples of ``num_tokens`` tokens, laid end to end."""
    rows = num_tokens * batch
    samples = CuSeqlens.of_lengths([num_tokens] * batch)
    return AttentionLayout(rows, (), 0, samples, Rows.of([(0, rows)]))
