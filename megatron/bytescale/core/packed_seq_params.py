"""Carry what attention and RoPE need to know about a micro-batch, as Megatron's own ``packed_seq_params``."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from bytescale_ext.attention.layouts.layout import AttentionLayout
from bytescale_ext.attention.layouts.slices import SliceLayout
from bytescale_ext.attention.slices import MicroBatchPrefix
from bytescale_ext.data.samples.packed import PackedMicroBatch

PackedUnit = tuple[int, PackedMicroBatch, MicroBatchPrefix | None]
"""What a schedule gives a forward step: index, tokens, and in slices the keys and values of earlier slices."""


@dataclass
class DocumentSeqParams(PackedSeqParams):
    """The layout of one micro-batch of documents, or of a slice, which Megatron passes from the model to each layer.

    ``qkv_format`` is "sbhd" with a batch of one: Megatron's "thd" branches cut every sequence over one static
    context-parallel group, which hybrid data parallelism replaces. The lengths of 1 are the rows of Megatron's own
    RoPE angles, which ``document_angles`` replaces.

    Attributes:
        positions: [t] position of each token in its document.
        layout: which rows attend to which.
        window_layout: which rows attend to which in layers with a sliding window.
        gram_rows: int64 [t, columns], rows of n-grams, in models with their memory; else, and in padding alone, None.
        prefix: of a slice, keys and values of its micro-batch in the layers of this model chunk.
        future: [t, count] the tokens after the label of each token, for draft heads or multi-token prediction.
        future_weights: [t, count] weights of their losses, for multi-token prediction.
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
