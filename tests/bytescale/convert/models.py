"""Tiny configurations of each family, as `config.json` has them once transformers has filled in its defaults."""

from __future__ import annotations

from typing import Any

VOCAB = 128
_BASE: dict[str, Any] = {
    "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCAB, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
}  # fmt: skip
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
PLAIN_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
LINEAR_ROPE: dict[str, Any] = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": LLAMA3, "tie_word_embeddings": False},
    "mistral": {"sliding_window": 16, "head_dim": 16, "tie_word_embeddings": False},
    "qwen2": {"tie_word_embeddings": True, "rope_parameters": LINEAR_ROPE},
    "qwen3": {"head_dim": 24, "tie_word_embeddings": False},
    "mixtral": {
        "num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.02, "head_dim": 16,
        "tie_word_embeddings": False,
    },
    "qwen3_moe": {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "head_dim": 16,
        "norm_topk_prob": False, "router_aux_loss_coef": 0.01, "tie_word_embeddings": False,
    },
}  # fmt: skip


def configuration_of(kind: str, **changes: Any) -> dict[str, Any]:
    """Return a tiny configuration of a family, with changes."""
    return {"model_type": kind, **_BASE, "rope_parameters": PLAIN_ROPE, **MODELS[kind], **changes}
