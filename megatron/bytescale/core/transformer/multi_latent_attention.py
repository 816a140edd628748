"""Multi-latent attention (DeepSeek-V2, section 2.1) over documents, in Megatron's own layer.

Megatron's layer rotates parts of queries and keys itself, by row. Here it gets the angles of document positions. Value
heads may be narrower or wider than query and key heads. Where it is cheaper, rings and slices transfer the latents
themselves, and attention expands them block by block (``bytescale_ext/attention/latent.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules

from bytescale_ext.attention.latent import Expansion, Halves, halves_of, latent_halves
from bytescale_ext.attention.layouts.layout import AttentionLayout
from bytescale_ext.plan.cost.model_shape import LatentShape
from megatron.bytescale.core.models.common.embeddings.rotary_pos_embedding import document_angles
from megatron.bytescale.core.packed_seq_params import DocumentSeqParams
from megatron.bytescale.core.transformer.dot_product_attention import DocumentAttention
from megatron.bytescale.runtime import Runtime


class DocumentLatentAttention(MLASelfAttention):
    """Megatron's multi-latent attention with document positions; only its ``core_attention`` communicates in rings."""

    rotary_pos_emb: DocumentRotary

    def __init__(
        self, *args: object, runtime: Runtime, core: type[DocumentLatentCore] | None = None, **kwargs: object
    ) -> None:
        """Build the layer. ``core``: class of ``core_attention``; None: ``DocumentLatentCore``."""
        super().__init__(*args, **kwargs)
        self.rotary_pos_emb = DocumentRotary(self.rotary_pos_emb)
        if self.config.q_lora_rank is not None and not self.config.sequence_parallel:
            for parameter in self.q_layernorm.parameters():  # its gradient is whole; Megatron would sum it
                parameter.average_gradients_across_tp_domain = True
        self.core_attention = (core or DocumentLatentCore)(
            self.config, self.layer_number, runtime=runtime, softmax_scale=self.softmax_scale
        )

    def _resolve_qk_norm_config(self, submodules: MLASelfAttentionSubmodules) -> dict[str, object]:
        """Return the classes of projections and norms; queries without a latent have no norm (DeepSeek-V2-Lite).

        Megatron would require a norm for such queries, which only TransformerEngine provides. If latents are
        transferred, attention applies the up-projection of keys and values.
        """
        if self.config.q_lora_rank is not None or submodules.kv_layernorm is IdentityOp:
            resolved: dict[str, object] = super()._resolve_qk_norm_config(submodules)
        else:
            names = ("linear_q_proj", "linear_kv_up_proj", "kv_layernorm")
            resolved = {name: getattr(submodules, name) for name in names}
        is_plain = resolved["linear_kv_up_proj"] is ColumnParallelLinear and not self.recompute_up_proj
        if latent_shape(self.config, is_plain).travels(self.num_attention_heads_per_partition, self.q_head_dim):
            resolved["linear_kv_up_proj"] = LatentUpProjection
        return resolved

    def _qkv_down_projection(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return Megatron's projections of hidden states [s / ranks, b, h], with whole key latents on each rank.

        The positional part of a key is shared by all heads, so each tensor-parallel rank has a gradient from its own
        heads, which must be summed. Megatron's local layers would split it over the ranks, and TransformerEngine's
        layers would keep it without sequence parallelism. Collective on the tensor-parallel group.
        """
        queries, latents = super()._qkv_down_projection(hidden_states)
        config, group = self.config, self.pg_collection.tp
        sizes = [config.kv_lora_rank, config.qk_pos_emb_head_dim]
        is_whole = latents.shape[-1] == sum(sizes)
        if is_whole and (config.sequence_parallel or group.size() == 1):
            return queries, latents
        if not is_whole:
            latents = gather_from_tensor_model_parallel_region(latents, group=group)
        if config.sequence_parallel:  # Megatron gathers the positional part and sums its gradient
            return queries, scatter_to_sequence_parallel_region(latents, group=group)
        latent, with_positions = latents.split(sizes, dim=-1)
        return queries, torch.cat((latent, copy_to_tensor_model_parallel_region(with_positions, group=group)), dim=-1)

    def get_query_key_value_tensors(
        self,
        hidden_states: torch.Tensor,
        key_value_states: None = None,
        position_ids: torch.Tensor | None = None,
        packed_seq_params: DocumentSeqParams | None = None,
        inference_context: None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Return queries, keys, values and the two latents that produce them, for hidden states [s / ranks, 1, h].

        If latents are transferred, the keys are the latents with the positional parts, [s, numbers], and the values are
        the weight of the up-projection (see ``DocumentLatentCore``). Collective on the tensor-parallel group.
        """
        if not isinstance(self.linear_kv_up_proj, LatentUpProjection):
            given = (hidden_states, key_value_states, position_ids, packed_seq_params, inference_context)
            projected: tuple[torch.Tensor, ...] = super().get_query_key_value_tensors(*given)
            return projected
        config, group = self.config, self.pg_collection.tp
        vectors, latents = (output.squeeze(1) for output in self._qkv_down_projection(hidden_states))
        latent, with_positions = latents.split([config.kv_lora_rank, config.qk_pos_emb_head_dim], dim=-1)
        if config.sequence_parallel:
            with_positions = gather_from_sequence_parallel_region(with_positions, group=group)
        latent = self.kv_layernorm(latent)
        whole, weight = self.linear_kv_up_proj(latent)
        if config.q_lora_rank is None:
            queries, _ = self.linear_q_proj(vectors)
        else:
            vectors = self.q_layernorm(vectors)
            queries, _ = self.linear_q_up_proj(vectors)
        queries = queries.unflatten(-1, (-1, self.q_head_dim))
        contents, query_positions = queries.split([config.qk_head_dim, config.qk_pos_emb_head_dim], dim=-1)
        rotate = self._rotation(packed_seq_params)
        query = torch.cat((contents, rotate(query_positions)), dim=-1)
        return query, torch.cat((whole, rotate(with_positions[:, None])[:, 0]), dim=-1), weight, vectors, latent

    def _rotation(self, params: DocumentSeqParams | None) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return a function that rotates parts of queries and keys [t, heads, dim] by their document positions."""
        positions = self.rotary_pos_emb.get_rotary_seq_len(None, None, None, self.config, params)
        of_positions = self.rotary_pos_emb(positions)
        angles, factor = of_positions if isinstance(of_positions, tuple) else (of_positions, 1.0)
        return partial(
            apply_rotary_pos_emb,
            freqs=angles,
            config=self.config,
            mscale=factor,
            cp_group=self.pg_collection.cp,
            mla_rotary_interleaved=True,
        )


class LatentSizes(Protocol):
    """Megatron's sizes of multi-latent attention, common to its arguments and its configuration of layers."""

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_pos_emb_head_dim: int
    v_head_dim: int
    qk_layernorm: bool


def latent_shape(config: LatentSizes, is_plain: bool) -> LatentShape:
    """Return the sizes of latent attention in Megatron's configuration or arguments; see ``LatentShape.is_plain``."""
    return LatentShape(
        query_rank=config.q_lora_rank or 0,
        key_rank=config.kv_lora_rank,
        position_dim=config.qk_pos_emb_head_dim,
        value_dim=config.v_head_dim,
        has_norms=bool(config.qk_layernorm),
        is_plain=is_plain,
    )


class LatentUpProjection(ColumnParallelLinear):
    """Megatron's up-projection of keys and values, for attention to apply; it is a module, so its hooks run."""

    def forward(self, latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        """Gather the latents of all tokens, [t, key_rank], from [t / ranks, key_rank]; also return this rank's weight.

        Collective on the tensor-parallel group, which sums the gradients of the latents, as in Megatron.
        """
        if self.sequence_parallel:
            whole = gather_from_sequence_parallel_region(latents, group=self.tp_group)
        else:
            whole = copy_to_tensor_model_parallel_region(latents, group=self.tp_group)
        return whole, self.weight


class DocumentRotary(torch.nn.Module):
    """Megatron's rotary embedding, with document positions in the place of a sequence length."""

    def __init__(self, rotary: RotaryEmbedding | YarnRotaryEmbedding) -> None:
        super().__init__()
        self.rotary = rotary

    def get_rotary_seq_len(
        self, context: object, block: object, hidden: object, config: object, params: DocumentSeqParams | None
    ) -> torch.Tensor:
        """Return the positions [t] of the rows of a micro-batch or slice."""
        assert isinstance(params, DocumentSeqParams) and params.positions is not None, f"{params=}"
        return params.positions

    def forward(self, positions: torch.Tensor, packed_seq: bool = False) -> torch.Tensor | tuple[torch.Tensor, float]:
        """Return the angles [t, 1, dim] of positions [t]; for YaRN also its scale of queries and keys."""
        angles = document_angles(self.rotary, positions)[:, 0]
        if isinstance(self.rotary, YarnRotaryEmbedding):
            return angles, self.rotary(2)[1]
        return angles


class DocumentLatentCore(DocumentAttention):
    """``DocumentAttention`` on tensors without a batch, with another head size for values than for queries and keys.

    Instead of keys and values it also accepts latents and the weight of the projection that expands them. In rings and
    slices keys and values travel as two halves of equal width.

    Attributes:
        hook: called as ``hook(attend, query, key, value, params, expansion)`` in place of ``attend``, if set.
    """

    hook: Callable[..., torch.Tensor] | None = None

    def forward(  # type: ignore[override]
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *given: object,
        packed_seq_params: DocumentSeqParams,
        **named: object,
    ) -> torch.Tensor:
        """Map query, key [t, heads, dim] and value [t, heads, value_dim] to [t, 1, heads * value_dim].

        With latents, ``key`` is [t, key_rank + position_dim] and ``value`` is the projection's weight [heads *
        (content_dim + value_dim), key_rank].
        """
        if key.dim() == 2:
            expansion = expansion_of(query, key, value)
            return self._attended(query.contiguous(), *latent_halves(key), packed_seq_params, expansion)
        widths, layout = (key.shape[-1], value.shape[-1]), packed_seq_params.layout
        if widths[0] == widths[1] or (isinstance(layout, AttentionLayout) and not layout.all_passes):
            q, k, v = (tensor.contiguous() for tensor in (query, key, value))
            return self._attended(q, k, v, packed_seq_params)
        halves = halves_of(torch.cat((key, value), dim=-1))
        return self._attended(query.contiguous(), *halves, packed_seq_params, Halves(widths))

    def _attended(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        params: DocumentSeqParams,
        expansion: Expansion | Halves | None = None,
    ) -> torch.Tensor:
        """Return ``attend``, through the hook if set, as [t, 1, heads * value_dim]; arguments as there."""
        given = (q, k, v, params, expansion)
        out = self.attend(*given) if self.hook is None else self.hook(self.attend, *given)
        return out.flatten(1)[:, None]


def expansion_of(query: torch.Tensor, latents: torch.Tensor, weight: torch.Tensor) -> Expansion:
    """Return the expansion of latents [t, key_rank + position_dim] for queries [t, heads, dim] by a weight."""
    position_dim = latents.shape[-1] - weight.shape[-1]
    content_dim = query.shape[-1] - position_dim
    return Expansion(weight, (content_dim, weight.shape[0] // query.shape[1] - content_dim), position_dim)
