"""Megatron's own GPT layers, with document attention (and a norm for sequence parallelism) in their spec."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.training.models.gpt import GPTModelConfig, default_layer_spec

from megatron.bytescale.core.models.common.embeddings.rotary_pos_embedding import DocumentRotaryEmbedding
from megatron.bytescale.core.transformer.dot_product_attention import DocumentAttention
from megatron.bytescale.core.transformer.norm import LocalNorm


def document_layer_spec(runtime: Any) -> Any:
    """``GPTModelConfig.transformer_layer_spec``: the default spec with its core attention replaced."""

    def layer_spec(config: GPTModelConfig, vp_stage: int | None = None) -> ModuleSpec | TransformerBlockSubmodules:
        spec = copy.deepcopy(default_layer_spec(config, vp_stage))  # type: ignore[arg-type]
        attention = spec.submodules.self_attention.submodules
        attention.core_attention = partial(DocumentAttention, runtime=runtime)
        if config.transformer.transformer_impl == "transformer_engine":
            return spec
        layer = spec.submodules
        layer.input_layernorm = layer.pre_mlp_layernorm = LocalNorm
        for name in ("q_layernorm", "k_layernorm"):
            if getattr(attention, name, None) not in (None, IdentityOp):
                setattr(attention, name, LocalNorm)
        return TransformerBlockSubmodules(layer_specs=[spec] * config.transformer.num_layers, layer_norm=LocalNorm)

    return layer_spec


def use_document_positions(model_chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """``ModelConfig.pre_wrap_hooks``: give each model chunk RoPE by position in the document."""
    for chunk in model_chunks:
        if hasattr(chunk, "rotary_pos_emb"):
            chunk.rotary_pos_emb = DocumentRotaryEmbedding(chunk.rotary_pos_emb)
    return model_chunks
