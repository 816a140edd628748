"""Multi-latent attention (DeepSeek-V2, section 2.1) over documents, in Megatron's own layer.

Megatron's layer rotates parts of queries and keys itself, by row; here it gets the angles of positions in documents.
Heads of values may be narrower than those of queries and keys, or wider.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from torch.nn.functional import pad

from megatron.bytescale.core.models.common.embeddings.rotary_pos_embedding import document_angles
from megatron.bytescale.core.packed_seq_params import DocumentSeqParams
from megatron.bytescale.core.transformer.dot_product_attention import DocumentAttention
from megatron.bytescale.runtime import Runtime


class DocumentLatentAttention(MLASelfAttention):
    """Megatron's multi-latent attention with positions in documents; communicates in its ``core_attention`` alone."""

    rotary_pos_emb: Any

    def __init__(self, *args: Any, runtime: Runtime, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rotary_pos_emb = DocumentRotary(self.rotary_pos_emb)
        self.core_attention = DocumentLatentCore(
            self.config, self.layer_number, runtime=runtime, softmax_scale=self.softmax_scale
        )

    def _resolve_qk_norm_config(self, submodules: MLASelfAttentionSubmodules) -> dict[str, Any]:
        """Return the classes of projections and norms; queries without a latent have no norm (DeepSeek-V2-Lite).

        Megatron would ask for a norm of theirs, which only TransformerEngine has.
        """
        if self.config.q_lora_rank is not None or submodules.kv_layernorm is IdentityOp:
            resolved: dict[str, Any] = super()._resolve_qk_norm_config(submodules)
            return resolved
        return {
            "linear_q_proj": submodules.linear_q_proj,
            "linear_kv_up_proj": submodules.linear_kv_up_proj,
            "kv_layernorm": submodules.kv_layernorm,
        }

    def _qkv_down_projection(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what Megatron's does, of hidden states [s / ranks, b, h]; the latents of keys are whole on each rank.

        Megatron's local layers would split the gradient of a key's part with positions over the tensor-parallel ranks,
        of which each has that of its own heads, without summing it up. Collective on that group.
        """
        queries, latents = super()._qkv_down_projection(hidden_states)
        config, group = self.config, self.pg_collection.tp
        sizes = [config.kv_lora_rank, config.qk_pos_emb_head_dim]
        if latents.shape[-1] == sum(sizes):
            return queries, latents
        latents = gather_from_tensor_model_parallel_region(latents, group=group)
        if config.sequence_parallel:  # Megatron gathers the part with positions, and sums its gradient
            return queries, scatter_to_sequence_parallel_region(latents, group=group)
        latent, with_positions = latents.split(sizes, dim=-1)
        return queries, torch.cat((latent, copy_to_tensor_model_parallel_region(with_positions, group=group)), dim=-1)


class DocumentRotary(torch.nn.Module):
    """Megatron's rotary embedding, called in its place: what stands for the length of a sequence are positions."""

    def __init__(self, rotary: RotaryEmbedding | YarnRotaryEmbedding) -> None:
        super().__init__()
        self.rotary = rotary

    def get_rotary_seq_len(self, context: Any, block: Any, hidden: Any, config: Any, params: Any) -> torch.Tensor:
        """Return the positions [t] of a micro-batch's rows, or of its slice's."""
        assert isinstance(params, DocumentSeqParams) and params.positions is not None, f"{params=}"
        return params.positions

    def forward(self, positions: torch.Tensor, packed_seq: bool = False) -> torch.Tensor | tuple[torch.Tensor, float]:
        """Return the angles [t, 1, dim] of positions [t]; of YaRN, with its factor of queries and keys."""
        angles = document_angles(self.rotary, positions)[:, 0]
        if isinstance(self.rotary, YarnRotaryEmbedding):
            return angles, self.rotary(2)[1]
        return angles


class DocumentLatentCore(DocumentAttention):
    """``DocumentAttention`` of tensors without a batch, whose values have another head size than queries and keys.

    The narrower of the two are filled up with zeros, which change no score and no other value.
    """

    def forward(  # type: ignore[override]
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *given: Any, **named: Any
    ) -> torch.Tensor:
        """Map query, key [t, heads, dim] and value [t, heads, value_dim] to [t, 1, heads * value_dim]."""
        width, value_width = max(key.shape[-1], value.shape[-1]), value.shape[-1]
        q, k, v = (pad(one, (0, width - one.shape[-1]))[:, None] for one in (query, key, value))
        out = super().forward(q, k, v, *given, **named)
        return out.unflatten(-1, (-1, width))[..., :value_width].flatten(-2)
