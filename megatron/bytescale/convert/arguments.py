"""Derives a model's Hugging Face configuration from Megatron's arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from megatron.bytescale.convert.families import FAMILIES
from megatron.bytescale.convert.rotary import RotaryArguments, rope_parameters

if TYPE_CHECKING:
    import torch

NEEDED: Final[dict[str, object]] = {
    "swiglu": True, "quick_geglu": False, "normalization": "RMSNorm", "rotary_percent": 1.0,
    "rotary_interleaved": False, "add_bias_linear": False, "apply_layernorm_1p": False, "softmax_type": "vanilla",
    "window_attn_skip_freq": None, "glu_linear_offset": 0.0,
    "activation_func_clamp_value": None, "no_rope_freq": None, "qk_l2_norm": False,
    "moe_shared_expert_intermediate_size": None, "moe_layer_freq": 1, "ngram_layers": None,
    "moe_router_score_function": "softmax", "moe_router_enable_expert_bias": False,
    "moe_router_topk_scaling_factor": None, "moe_router_num_groups": None, "moe_shared_expert_gate": False,
    "moe_latent_size": None,
}  # fmt: skip
"""Required arguments of convertible models and their values."""
_SHARED: Final = ("moe_shared_expert_intermediate_size", "moe_layer_freq", "moe_router_topk_scaling_factor")
_BIASED: Final = (*_SHARED, "moe_router_num_groups")
FREE: Final = {
    "deepseek_v2": _SHARED,
    "deepseek_v3": _BIASED,
    "glm4_moe": (*_BIASED, "rotary_percent"),
    "gpt_oss": ("window_attn_skip_freq", "activation_func_clamp_value"),
}
"""Arguments that may have any value in a family."""
_NO_SCALING: Final = {
    "position_embedding_type": "rope", "use_rope_scaling": False, "rotary_seq_len_interpolation_factor": None,
    "window_size": None,
}  # fmt: skip
_LATENT: Final = {
    **_NO_SCALING, "qk_layernorm": True, "group_query_attention": False, "add_qkv_bias": False,
    "layernorm_epsilon": 1e-6,
}  # fmt: skip
_BY_BIAS: Final = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
OWN: Final[dict[str, dict[str, object]]] = {
    "deepseek_v2": {**_LATENT, "moe_router_pre_softmax": True},
    "deepseek_v3": {**_LATENT, **_BY_BIAS},
    "glm4_moe": {**_NO_SCALING, **_BY_BIAS},
    "gpt_oss": {
        "swiglu": False, "quick_geglu": True, "add_bias_linear": True, "softmax_type": "learnable",
        "glu_linear_offset": 1.0, "qk_layernorm": False, "moe_router_pre_softmax": False,
    },
}  # fmt: skip
"""Required arguments of a single family, which override ``NEEDED``."""


@dataclass(frozen=True, kw_only=True)
class TrainedModel(RotaryArguments):
    """Megatron's model arguments, under the same names; arguments with a default are missing in older checkpoints."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    group_query_attention: bool
    num_query_groups: int | None = None
    kv_channels: int
    padded_vocab_size: int
    unpadded_vocab_size: int | None = None
    vocab_size: int | None = None
    max_position_embeddings: int
    normalization: str
    layernorm_epsilon: float
    untie_embeddings_and_output_weights: bool
    params_dtype: torch.dtype
    swiglu: bool
    quick_geglu: bool = False
    glu_linear_offset: float = 0.0
    activation_func_clamp_value: float | None = None
    add_bias_linear: bool
    add_qkv_bias: bool
    qk_layernorm: bool
    qk_l2_norm: bool = False
    apply_layernorm_1p: bool = False
    softmax_type: str = "vanilla"
    window_size: tuple[int, int] | None
    window_attn_skip_freq: int | list[int] | None = None
    no_rope_freq: int | list[int] | None = None
    rotary_interleaved: bool = False
    ngram_layers: tuple[int, ...] | None = None
    num_experts: int | None
    moe_ffn_hidden_size: int | None = None
    moe_router_topk: int = 2
    moe_aux_loss_coeff: float = 0.0
    moe_router_pre_softmax: bool = False
    moe_router_score_function: str = "softmax"
    moe_router_enable_expert_bias: bool = False
    moe_router_topk_scaling_factor: float | None = None
    moe_router_num_groups: int | None = None
    moe_router_group_topk: int | None = None
    moe_layer_freq: int | list[int] = 1
    moe_shared_expert_intermediate_size: int | None = None
    moe_shared_expert_gate: bool = False
    moe_latent_size: int | None = None
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    qk_head_dim: int | None = None
    qk_pos_emb_head_dim: int | None = None
    v_head_dim: int | None = None


def kind_of(model: TrainedModel) -> str:
    """Return the ``model_type`` of a model. Raises ValueError if no family matches."""
    is_biased = bool(model.num_experts) and model.moe_router_score_function == "sigmoid"
    if model.multi_latent_attention:
        kind = "deepseek_v3" if is_biased else "deepseek_v2"
    elif model.quick_geglu:
        kind = "gpt_oss"
    else:
        kind = "glm4_moe" if is_biased else "llama"
    if model.position_embedding_type not in ("rope", "yarn"):
        positions = model.position_embedding_type
        raise ValueError(
            f"a model with position_embedding_type {positions!r} cannot be converted: only 'rope' and 'yarn'"
        )
    needed = {name: value for name, value in NEEDED.items() if name not in FREE.get(kind, ())}
    for name, value in {**needed, **OWN.get(kind, {})}.items():
        actual = getattr(model, name)
        if actual != value and (actual or value):
            raise ValueError(f"a model with {name} {actual!r} cannot be converted: only {value!r}")
    if kind == "llama":
        return _plain_kind(model)
    if not model.num_experts:
        raise ValueError(f"a model like {kind} without experts cannot be converted")
    if kind == "gpt_oss" and not model.activation_func_clamp_value:
        raise ValueError("a model like gpt_oss needs --activation-func-clamp-value to be converted")
    return kind


def _plain_kind(model: TrainedModel) -> str:
    """Return the ``model_type`` of a SwiGLU model with standard attention."""
    if model.add_qkv_bias and (model.num_experts or model.qk_layernorm):
        raise ValueError(
            "query, key and value biases can be converted only in dense models without query and key norms"
        )
    if model.num_experts and model.moe_router_pre_softmax and not model.qk_layernorm:
        raise ValueError("a model like mixtral with moe_router_pre_softmax True cannot be converted: only False")
    if model.num_experts:
        return "qwen3_moe" if model.qk_layernorm else "mixtral"
    if model.qk_layernorm or model.add_qkv_bias:
        return "qwen3" if model.qk_layernorm else "qwen2"
    return "mistral" if model.window_size else "llama"


def configuration(model: TrainedModel) -> dict[str, object]:
    """Return the Hugging Face configuration of a model. Raises ValueError like ``kind_of``."""
    kind = kind_of(model)
    family = FAMILIES[kind]
    config: dict[str, object] = {
        "model_type": kind,
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_query_groups if model.group_query_attention else model.num_attention_heads,
        "head_dim": model.kv_channels,
        "vocab_size": _rows(model),
        "max_position_embeddings": model.max_position_embeddings,
        "rms_norm_eps": model.layernorm_epsilon,
        "hidden_act": "silu",
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
        "rope_parameters": rope_parameters(model),
        "dtype": str(model.params_dtype).removeprefix("torch."),
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if model.window_size:
        config |= {"sliding_window": model.window_size[0] + 1, "use_sliding_window": True}
    elif kind in ("mistral", "mixtral", "gpt_oss"):
        config["sliding_window"] = None
    if family.num_experts:
        config |= {
            family.num_experts: model.num_experts,
            family.expert_width: model.moe_ffn_hidden_size,
            "num_experts_per_tok": model.moe_router_topk,
        }
        if not family.names.get("has_expert_bias"):
            aux_loss = "aux_loss_alpha" if kind == "deepseek_v2" else "router_aux_loss_coef"
            config[aux_loss] = model.moe_aux_loss_coeff
    if kind in ("qwen3_moe", "deepseek_v2"):
        config["norm_topk_prob"] = not model.moe_router_pre_softmax
    for own in OF_FAMILIES.get(kind, ()):
        config |= own(model)
    return config


def _rows(model: TrainedModel) -> int:
    """Return the number of tokens with trained rows, without the rows that Megatron adds for tensor parallelism."""
    return min(model.unpadded_vocab_size or model.vocab_size or model.padded_vocab_size, model.padded_vocab_size)


def _of_latents(model: TrainedModel) -> dict[str, object]:
    """Return the settings of latent attention."""
    return {
        "head_dim": model.qk_pos_emb_head_dim,
        "q_lora_rank": model.q_lora_rank,
        "kv_lora_rank": model.kv_lora_rank,
        "qk_nope_head_dim": model.qk_head_dim,
        "qk_rope_head_dim": model.qk_pos_emb_head_dim,
        "v_head_dim": model.v_head_dim,
    }


def _of_shared_experts(model: TrainedModel) -> dict[str, object]:
    """Return the settings of models with shared experts. Raises ValueError for experts that no family has."""
    freq = model.moe_layer_freq
    has_experts = [int((layer + 1) % freq == 0) for layer in range(model.num_layers)] if isinstance(freq, int) else freq
    num_dense = model.num_layers - sum(has_experts)
    if has_experts != sorted(has_experts):
        raise ValueError(f"moe_layer_freq {freq}: layers without experts can be converted only at the start")
    assert model.moe_ffn_hidden_size is not None, f"{model=}"
    num_shared, rest = divmod(model.moe_shared_expert_intermediate_size or 0, model.moe_ffn_hidden_size)
    if rest or not num_shared:
        raise ValueError(
            f"moe_shared_expert_intermediate_size {model.moe_shared_expert_intermediate_size}: only a multiple of "
            f"moe_ffn_hidden_size {model.moe_ffn_hidden_size} can be converted"
        )
    return {
        "first_k_dense_replace": num_dense,
        "n_shared_experts": num_shared,
        "routed_scaling_factor": model.moe_router_topk_scaling_factor or 1.0,
    }


def _of_greedy_choice(model: TrainedModel) -> dict[str, object]:
    """Return the setting of DeepSeek-V2's router."""
    return {"topk_method": "greedy"}


def _of_biased_choice(model: TrainedModel) -> dict[str, object]:
    """Return the settings of a router with a bias for each expert. Raises ValueError for groups of another kind."""
    groups, chosen = model.moe_router_num_groups or 1, model.moe_router_group_topk or 1
    if groups > 1 and model.moe_router_topk != 2 * chosen:
        raise ValueError(
            f"moe_router_group_topk {chosen}: only half of moe_router_topk {model.moe_router_topk} can be converted"
        )
    return {"n_group": groups, "topk_group": chosen, "norm_topk_prob": True, "num_nextn_predict_layers": 0}


def _of_glm(model: TrainedModel) -> dict[str, object]:
    """Return the settings that only GLM-4.5 has."""
    rope = {**rope_parameters(model), "partial_rotary_factor": model.rotary_percent}
    return {"attention_bias": model.add_qkv_bias, "use_qk_norm": model.qk_layernorm, "rope_parameters": rope}


def _of_gpt_oss(model: TrainedModel) -> dict[str, object]:
    """Return the settings that only gpt-oss has."""
    from megatron.core.transformer.utils import is_layer_window_attention

    sees_less = [
        is_layer_window_attention(model.window_size, model.window_attn_skip_freq, layer + 1)
        for layer in range(model.num_layers)
    ]
    return {
        "intermediate_size": model.moe_ffn_hidden_size,
        "swiglu_alpha": 1.702,
        "swiglu_limit": model.activation_func_clamp_value,
        "attention_bias": True,
        "layer_types": ["sliding_attention" if less else "full_attention" for less in sees_less],
    }


OF_FAMILIES: Final[dict[str, tuple[Callable[[TrainedModel], dict[str, object]], ...]]] = {
    "deepseek_v2": (_of_latents, _of_shared_experts, _of_greedy_choice),
    "deepseek_v3": (_of_latents, _of_shared_experts, _of_biased_choice),
    "glm4_moe": (_of_shared_experts, _of_biased_choice, _of_glm),
    "gpt_oss": (_of_gpt_oss,),
}
"""Settings that only some families have."""
