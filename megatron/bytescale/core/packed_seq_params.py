"""What attention and RoPE must know of a micro-batch, carried by Megatron's own ``packed_seq_params``."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from bytescale_ext.attention.layout import AttentionLayout
from bytescale_ext.attention.prefix_kv import MicroBatchPrefix
from bytescale_ext.attention.slice_layout import SliceLayout


@dataclass
class DocumentSeqParams(PackedSeqParams):
    """The layout of one micro-batch of documents, or of a slice, as Megatron hands it from the model to each layer.

    ``qkv_format`` is "sbhd" with a batch of one: Megatron's "thd" branches cut every sequence over one static
    context-parallel group, which is what hybrid data parallelism replaces.

    Attributes:
        positions: [t] position of each token in its document.
        layout: which rows attend to which.
        prefix: of a slice, keys and values of its micro-batch in the layers of this model chunk.
    """

    qkv_format: str = "sbhd"
    positions: torch.Tensor | None = None
    layout: AttentionLayout | SliceLayout | None = None
    prefix: MicroBatchPrefix | None = None
