"""RoPE by position in the document, for tokens in any order."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

from megatron.bytescale.core.packed_seq_params import DocumentSeqParams


class DocumentRotaryEmbedding(torch.nn.Module):
    """Stands where ``GPTModel.rotary_pos_emb`` stands, with the frequencies of the one that it replaces.

    The model asks ``get_rotary_seq_len`` what to pass to ``forward``; the answer here is each token's position.
    Only the angles of the tokens present are computed, so a 2M-token context costs no table.
    """

    def __init__(self, rotary: RotaryEmbedding) -> None:
        super().__init__()
        self.rotary = rotary

    def get_rotary_seq_len(self, inference_context: Any, transformer: Any, transformer_input: Any, config: Any,
                           packed_seq_params: Any = None, **_: Any) -> Any:  # fmt: skip
        """The positions of a micro-batch of documents; otherwise what Megatron would say."""
        if isinstance(packed_seq_params, DocumentSeqParams):
            return packed_seq_params.positions
        return self.rotary.get_rotary_seq_len(
            inference_context, transformer, transformer_input, config, packed_seq_params
        )

    def forward(self, positions: Any, packed_seq: bool = False, cp_group: Any = None) -> torch.Tensor:
        """Angles [t, 1, 1, dim] of the given positions [t]."""
        rotary = self.rotary
        if not isinstance(positions, torch.Tensor):
            return rotary(positions, packed_seq=packed_seq, cp_group=cp_group)
        scale = 1.0 if rotary.seq_len_interpolation_factor is None else 1.0 / rotary.seq_len_interpolation_factor
        frequencies = rotary.inv_freq.to(positions.device)
        angles = torch.outer(positions.to(frequencies.dtype) * scale, frequencies)
        if rotary.rotary_interleaved:
            angles = angles.repeat_interleave(2, dim=-1)
        else:
            angles = torch.cat((angles, angles), dim=-1)
        return angles[:, None, None, :]
