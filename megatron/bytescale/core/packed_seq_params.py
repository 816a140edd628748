"""A micro-batch's layout for attention and RoPE, passed in the place of Megatron's ``packed_seq_params``."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from bytescale_ext.attention.layouts.layout import AttentionLayout
from bytescale_ext.attention.layouts.slices import SliceLayout
from bytescale_ext.attention.slices import MicroBatchPrefix
from bytescale_ext.data.samples.packed import PackedMicroBatch

PackedUnit = tuple[int, PackedMicroBatch, MicroBatchPrefix | None]
"""Input of a forward step: index, tokens and, for a slice, the keys and values of earlier slices."""


@dataclass
class DocumentSeqParams(PackedSeqParams):
    """The layout of one micro-batch or slice of documents, which Megatron passes from the model to each layer.

    ``qkv_format`` is "sbhd" with a batch of one, because Megatron's "thd" branches split every sequence over one static
    context-parallel group, which hybrid data parallelism replaces. The maximum lengths are 1, so that Megatron computes
    only one row of its own RoPE angles, which ``document_angles`` replaces.

    Attributes:
        positions: position of each token in its document, [t].
        layout: pairs of rows that attend to each other.
        window_layout: pairs of rows that attend to each other in layers with a sliding window.
        gram_rows: rows of n-grams, int64 [t, columns]; None without n-gram memory, and if all tokens are padding.
        prefix: keys and values of a slice's micro-batch in the layers of this model chunk; None without slices.
        future: tokens after the label of each token, [t, count], for draft heads or multi-token prediction.
        future_weights: loss weights of these tokens, [t, count], for multi-token prediction.
        depth: depth of the multi-token prediction layer that runs, from 0; 0 in the other layers.
    """

    qkv_format: str = "sbhd"
    max_seqlen_q: int = 1
    max_seqlen_kv: int = 1
    positions: torch.Tensor | None = None
    layout: AttentionLayout | SliceLayout | None = None
    window_layout: AttentionLayout | SliceLayout | None = None
    gram_rows: torch.Tensor | None = None
    prefix: MicroBatchPrefix | None = None
    future: torch.Tensor | None = None
    future_weights: torch.Tensor | None = None
    depth: int = 0
