"""The Hugging Face configuration of the model that Megatron's arguments describe."""

from __future__ import annotations

from typing import Any, Final

from megatron.bytescale.convert.families import FAMILIES
from megatron.bytescale.convert.rotary import rope_parameters

NEEDED: Final[dict[str, Any]] = {
    "swiglu": True, "quick_geglu": False, "normalization": "RMSNorm", "rotary_percent": 1.0,
    "rotary_interleaved": False, "add_bias_linear": False, "apply_layernorm_1p": False, "softmax_type": "vanilla",
    "window_attn_skip_freq": None, "mtp_num_layers": None, "glu_linear_offset": 0.0,
    "activation_func_clamp_value": None, "no_rope_freq": None, "qk_l2_norm": False,
    "moe_shared_expert_intermediate_size": None, "moe_layer_freq": 1, "ngram_layers": None,
    "moe_router_score_function": "softmax", "moe_router_enable_expert_bias": False,
    "moe_router_topk_scaling_factor": None, "moe_router_num_groups": None, "moe_shared_expert_gate": False,
    "moe_latent_size": None,
}  # fmt: skip
"""Arguments of every model that can be converted, and their values."""
FREE: Final = {
    "deepseek_v2": ("moe_shared_expert_intermediate_size", "moe_layer_freq", "moe_router_topk_scaling_factor"),
    "gpt_oss": ("window_attn_skip_freq", "activation_func_clamp_value"),
}
"""Those of which a family has any value."""
OWN: Final[dict[str, dict[str, Any]]] = {
    "deepseek_v2": {
        "position_embedding_type": "rope", "qk_layernorm": True, "group_query_attention": False,
        "add_qkv_bias": False, "moe_router_pre_softmax": True, "layernorm_epsilon": 1e-6, "window_size": None,
        "use_rope_scaling": False, "rotary_seq_len_interpolation_factor": None,
    },
    "gpt_oss": {
        "swiglu": False, "quick_geglu": True, "add_bias_linear": True, "softmax_type": "learnable",
        "glu_linear_offset": 1.0, "qk_layernorm": False, "moe_router_pre_softmax": False,
    },
}  # fmt: skip
"""Those that only a family has so."""


def kind_of(args: Any) -> str:
    """Return the ``model_type`` whose model Megatron's arguments describe. Raises ValueError where there is none."""
    kind = "gpt_oss" if getattr(args, "quick_geglu", False) else "llama"
    kind = "deepseek_v2" if getattr(args, "multi_latent_attention", False) else kind
    if args.position_embedding_type not in ("rope", "yarn"):
        found = args.position_embedding_type
        raise ValueError(f"a model with position_embedding_type {found!r} cannot be converted: only 'rope' and 'yarn'")
    needed = {name: value for name, value in NEEDED.items() if name not in FREE.get(kind, ())}
    for name, value in {**needed, **OWN.get(kind, {})}.items():
        found = getattr(args, name, value)
        if found != value and (found or value):
            raise ValueError(f"a model with {name} {found!r} cannot be converted: only {value!r}")
    if kind == "llama":
        return _plain_kind(args)
    if not args.num_experts:
        raise ValueError(f"a model like {kind} without experts cannot be converted")
    if kind == "gpt_oss" and not args.activation_func_clamp_value:
        raise ValueError("a model like gpt_oss needs --activation-func-clamp-value to be converted")
    return kind


def _plain_kind(args: Any) -> str:
    """Return the kind of a model with SwiGLU whose heads have keys and values."""
    if args.add_qkv_bias and (args.num_experts or args.qk_layernorm):
        raise ValueError(
            "biases of queries, keys and values can be converted in dense models without their norms alone"
        )
    if args.num_experts:
        return "qwen3_moe" if args.qk_layernorm else "mixtral"
    if args.qk_layernorm or args.add_qkv_bias:
        return "qwen3" if args.qk_layernorm else "qwen2"
    return "mistral" if args.window_size else "llama"


def configuration(args: Any) -> dict[str, Any]:
    """Return the Hugging Face configuration of the model of Megatron's arguments. Raises ValueError as ``kind_of``."""
    kind = kind_of(args)
    family = FAMILIES[kind]
    config: dict[str, Any] = {
        "model_type": kind,
        "num_hidden_layers": args.num_layers,
        "hidden_size": args.hidden_size,
        "intermediate_size": args.ffn_hidden_size,
        "num_attention_heads": args.num_attention_heads,
        "num_key_value_heads": args.num_query_groups if args.group_query_attention else args.num_attention_heads,
        "head_dim": args.kv_channels,
        "vocab_size": args.padded_vocab_size,
        "max_position_embeddings": args.max_position_embeddings,
        "rms_norm_eps": args.layernorm_epsilon,
        "hidden_act": "silu",
        "tie_word_embeddings": not args.untie_embeddings_and_output_weights,
        "rope_parameters": rope_parameters(args),
        "dtype": str(args.params_dtype).removeprefix("torch."),
    }
    if args.window_size:
        config |= {"sliding_window": args.window_size[0] + 1, "use_sliding_window": True}
    elif kind in ("mistral", "mixtral", "gpt_oss"):
        config["sliding_window"] = None
    if family.num_experts:
        config |= {
            family.num_experts: args.num_experts,
            family.expert_width: args.moe_ffn_hidden_size,
            "num_experts_per_tok": args.moe_router_topk,
        }
        aux_loss = "aux_loss_alpha" if kind == "deepseek_v2" else "router_aux_loss_coef"
        config[aux_loss] = args.moe_aux_loss_coeff
    if kind in ("mixtral", "qwen3_moe", "deepseek_v2"):
        config["norm_topk_prob"] = not args.moe_router_pre_softmax
    own = {"deepseek_v2": _of_deepseek, "gpt_oss": _of_gpt_oss}
    return config | own[kind](args) if kind in own else config


def _of_deepseek(args: Any) -> dict[str, Any]:
    """Return what only DeepSeek-V2 has. Raises ValueError for experts that it has not."""
    freq = args.moe_layer_freq
    has_experts = [int((layer + 1) % freq == 0) for layer in range(args.num_layers)] if isinstance(freq, int) else freq
    num_dense = args.num_layers - sum(has_experts)
    if has_experts != sorted(has_experts):
        raise ValueError(f"moe_layer_freq {freq}: only first layers without experts can be converted")
    num_shared, rest = divmod(args.moe_shared_expert_intermediate_size or 0, args.moe_ffn_hidden_size)
    if rest or not num_shared:
        raise ValueError(
            f"moe_shared_expert_intermediate_size {args.moe_shared_expert_intermediate_size}: only a multiple of "
            f"moe_ffn_hidden_size {args.moe_ffn_hidden_size} can be converted"
        )
    return {
        "head_dim": args.qk_pos_emb_head_dim,
        "q_lora_rank": args.q_lora_rank,
        "kv_lora_rank": args.kv_lora_rank,
        "qk_nope_head_dim": args.qk_head_dim,
        "qk_rope_head_dim": args.qk_pos_emb_head_dim,
        "v_head_dim": args.v_head_dim,
        "first_k_dense_replace": num_dense,
        "n_shared_experts": num_shared,
        "routed_scaling_factor": args.moe_router_topk_scaling_factor or 1.0,
        "topk_method": "greedy",
    }


def _of_gpt_oss(args: Any) -> dict[str, Any]:
    """Return what only gpt-oss has."""
    from megatron.core.transformer.utils import is_layer_window_attention

    sees_less = [
        is_layer_window_attention(args.window_size, args.window_attn_skip_freq, layer + 1)
        for layer in range(args.num_layers)
    ]
    return {
        "intermediate_size": args.moe_ffn_hidden_size,
        "swiglu_alpha": 1.702,
        "swiglu_limit": args.activation_func_clamp_value,
        "attention_bias": True,
        "layer_types": ["sliding_attention" if less else "full_attention" for less in sees_less],
    }
