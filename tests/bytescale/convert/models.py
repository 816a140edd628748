"""Tiny configurations of each family, as in `config.json` with the defaults of transformers."""

from __future__ import annotations

from importlib.metadata import version
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
YARN: dict[str, Any] = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "model_type": "deepseek_v2", "num_hidden_layers": 3, "num_key_value_heads": 4, "rms_norm_eps": 1e-6,
    "q_lora_rank": None, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "n_shared_experts": 2,
    "first_k_dense_replace": 1, "norm_topk_prob": False, "tie_word_embeddings": False,
    "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": LLAMA3, "tie_word_embeddings": False},
    "mistral": {"sliding_window": 16, "head_dim": 16, "tie_word_embeddings": False},
    "qwen2": {"tie_word_embeddings": True, "rope_parameters": LINEAR_ROPE},
    "qwen3": {"head_dim": 24, "tie_word_embeddings": False, "rope_parameters": YARN},
    "mixtral": {
        "num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.02, "head_dim": 16,
        "tie_word_embeddings": False,
    },
    "qwen3_moe": {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "head_dim": 16,
        "norm_topk_prob": False, "router_aux_loss_coef": 0.01, "tie_word_embeddings": False,
    },
    "deepseek_v2_lite": LATENT,
    "deepseek_v2": {
        **LATENT, "q_lora_rank": 24, "routed_scaling_factor": 2.5, "first_k_dense_replace": 0,
        "rope_parameters": PLAIN_ROPE,
    },
    "deepseek_v3": {
        **LATENT, "model_type": "deepseek_v3", "q_lora_rank": 24, "n_routed_experts": 8, "num_experts_per_tok": 4,
        "n_shared_experts": 1, "n_group": 4, "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
        "num_nextn_predict_layers": 0,
    },
    "glm4_moe": {
        "num_hidden_layers": 3, "head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
        "moe_intermediate_size": 48, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "attention_bias": True,
        "use_qk_norm": True, "norm_topk_prob": True, "routed_scaling_factor": 1.5, "tie_word_embeddings": False,
        "num_nextn_predict_layers": 0,
        "rope_parameters": {**PLAIN_ROPE, "partial_rotary_factor": 0.5},
    },
    "gpt_oss": {
        "num_hidden_layers": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.01,
        "head_dim": 16, "sliding_window": 16, "swiglu_limit": 1.5, "tie_word_embeddings": False,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "rope_parameters": {**YARN, "truncate": False},
    },
}  # fmt: skip

# Version 4 lacks the factor of YaRN in the attention of DeepSeek-V2, and ignores the swiglu_limit of gpt-oss.
UNLIKE_IN_VERSION_4 = ("deepseek_v2_lite", "gpt_oss")
IS_VERSION_4 = version("transformers").startswith("4.")
if IS_VERSION_4:
    del MODELS["deepseek_v2_lite"]
    MODELS["gpt_oss"]["swiglu_limit"] = 7.0


def configuration_of(kind: str, **changes: Any) -> dict[str, Any]:
    """Return a tiny configuration of one of ``MODELS``. Its name is its family, unless the entry has a family."""
    return {"model_type": kind, **_BASE, "rope_parameters": PLAIN_ROPE, **MODELS[kind], **changes}
