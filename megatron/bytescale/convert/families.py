"""Model families: the Megatron flags of a Hugging Face configuration, and the configuration of Megatron's arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from bytescale_ext.convert.layout import Layout

LLAMA3_ROPE: Final = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""What Megatron's ``--use-rope-scaling`` takes for granted."""


@dataclass(frozen=True)
class Family:
    """Models whose configurations have one ``model_type``.

    Attributes:
        qkv_bias: queries, keys and values have biases.
        qk_norm: queries and keys have norms.
        num_experts: the configuration's name for the number of experts; "": the family is dense.
        expert_width: its name for the width of an expert.
        names: of tensors where they are not Llama's; see ``Layout``.
    """

    qkv_bias: bool = False
    qk_norm: bool = False
    num_experts: str = ""
    expert_width: str = ""
    names: Mapping[str, Any] | None = None


FAMILIES: Final = {
    "llama": Family(),
    "mistral": Family(),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(qk_norm=True),
    "mixtral": Family(
        num_experts="num_local_experts",
        expert_width="intermediate_size",
        names={
            "router": "block_sparse_moe.gate", "experts": "block_sparse_moe.experts.{}.{}",
            "products": ("w1", "w3", "w2"),
        },
    ),
    "qwen3_moe": Family(qk_norm=True, num_experts="num_experts", expert_width="moe_intermediate_size"),
}  # fmt: skip


def family_of(config: Mapping[str, Any]) -> Family:
    """Return the family of a configuration. Raises ValueError for one that is not in the table."""
    kind = config.get("model_type")
    if kind not in FAMILIES:
        raise ValueError(f"model_type {kind!r} cannot be converted; these can: {', '.join(FAMILIES)}")
    return FAMILIES[kind]


def layout_of(config: Mapping[str, Any]) -> Layout:
    """Return what decides the names of the tensors of a configuration's model. Raises ValueError as ``family_of``."""
    family = family_of(config)
    return Layout(
        num_layers=config["num_hidden_layers"],
        num_groups=config["num_key_value_heads"],
        head_dim=head_dim_of(config),
        is_tied=config["tie_word_embeddings"],
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        num_experts=config[family.num_experts] if family.num_experts else 0,
        **(family.names or {}),
    )


def head_dim_of(config: Mapping[str, Any]) -> int:
    """Return the size of a head."""
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def model_flags(config: Mapping[str, Any]) -> list[str]:
    """Return Megatron's flags of the model of a configuration.

    Raises ValueError for a model that Megatron would compute otherwise.
    """
    family = family_of(config)
    _check(config)
    flags = {
        "--num-layers": config["num_hidden_layers"],
        "--hidden-size": config["hidden_size"],
        "--ffn-hidden-size": config["intermediate_size"],
        "--num-attention-heads": config["num_attention_heads"],
        "--num-query-groups": config["num_key_value_heads"],
        "--kv-channels": head_dim_of(config),
        "--max-position-embeddings": config["max_position_embeddings"],
        "--normalization": "RMSNorm",
        "--norm-epsilon": config["rms_norm_eps"],
        "--position-embedding-type": "rope",
        "--rotary-base": int(config["rope_parameters"]["rope_theta"]),
        "--attention-dropout": 0,
        "--hidden-dropout": 0,
    }
    words = ["--group-query-attention", "--swiglu", "--disable-bias-linear"]
    words += [] if config["tie_word_embeddings"] else ["--untie-embeddings-and-output-weights"]
    words += ["--add-qkv-bias"] if family.qkv_bias else []
    words += ["--qk-layernorm"] if family.qk_norm else []
    words += _rope_flags(config["rope_parameters"])
    window = window_of(config)
    if window is not None:
        flags["--window-size"] = f"{window - 1},0"
    if family.num_experts:
        flags |= {
            "--num-experts": config[family.num_experts],
            "--moe-ffn-hidden-size": config[family.expert_width],
            "--moe-router-topk": config["num_experts_per_tok"],
            "--moe-router-load-balancing-type": "aux_loss",
            "--moe-aux-loss-coeff": config["router_aux_loss_coef"],
        }
        words += [] if config.get("norm_topk_prob", True) else ["--moe-router-pre-softmax"]
    return [str(word) for pair in flags.items() for word in pair] + words


def window_of(config: Mapping[str, Any]) -> int | None:
    """Return how many tokens each token sees, itself included; None: all before it."""
    if not config.get("use_sliding_window", True):
        return None
    window: int | None = config.get("sliding_window")
    return window


def _check(config: Mapping[str, Any]) -> None:
    """Raise ValueError for settings that Megatron's model would not compute."""
    needed = {
        "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }  # fmt: skip
    for name, value in needed.items():
        found = config.get(name, value)
        if found != value and found is not None:
            raise ValueError(f"{name} is {found!r}: only {value!r} can be converted")
    types = set(config.get("layer_types") or ["full_attention"])
    if len(types) > 1:
        raise ValueError("layers with and without a sliding window cannot be converted")


def _rope_flags(rope: Mapping[str, Any]) -> list[str]:
    """Return the flags of rotary positions beside their base. Raises ValueError for kinds that Megatron has not."""
    kind, factor = rope.get("rope_type", "default"), rope.get("factor", 1.0)
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("partial_rotary_factor: only 1.0 can be converted")
    if kind == "default":
        return []
    if kind == "linear" and factor == int(factor):
        return ["--rotary-seq-len-interpolation-factor", str(int(factor))]
    if kind == "llama3" and all(rope[name] == value for name, value in LLAMA3_ROPE.items()):
        return ["--use-rope-scaling", "--rope-scaling-factor", str(factor)]
    raise ValueError(f"rotary positions {dict(rope)} cannot be converted")


def kind_of(args: Any) -> str:
    """Return the ``model_type`` whose model Megatron's arguments describe. Raises ValueError where there is none."""
    needed = {
        "swiglu": True, "normalization": "RMSNorm", "position_embedding_type": "rope", "rotary_percent": 1.0,
        "rotary_interleaved": False, "add_bias_linear": False, "multi_latent_attention": False,
        "apply_layernorm_1p": False, "softmax_type": "vanilla", "window_attn_skip_freq": None, "mtp_num_layers": None,
        "moe_shared_expert_intermediate_size": None, "moe_layer_freq": 1, "ngram_layers": None,
        "moe_router_score_function": "softmax", "moe_router_enable_expert_bias": False,
    }  # fmt: skip
    for name, value in needed.items():
        found = getattr(args, name, value)
        if found != value and (found or value):
            raise ValueError(f"a model with {name} {found!r} cannot be converted: only {value!r}")
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
        "rope_parameters": _rope_parameters(args),
        "dtype": str(args.params_dtype).removeprefix("torch."),
    }
    if args.window_size:
        config |= {"sliding_window": args.window_size[0] + 1, "use_sliding_window": True}
    elif kind in ("mistral", "mixtral"):
        config["sliding_window"] = None
    if family.num_experts:
        config |= {
            family.num_experts: args.num_experts,
            family.expert_width: args.moe_ffn_hidden_size,
            "num_experts_per_tok": args.moe_router_topk,
            "router_aux_loss_coef": args.moe_aux_loss_coeff,
            "norm_topk_prob": not args.moe_router_pre_softmax,
        }
    return config


def _rope_parameters(args: Any) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(args.rotary_base)}
    if args.use_rope_scaling:
        rope |= {"rope_type": "llama3", "factor": args.rope_scaling_factor, **LLAMA3_ROPE}
    elif args.rotary_seq_len_interpolation_factor:
        rope |= {"rope_type": "linear", "factor": float(args.rotary_seq_len_interpolation_factor)}
    return rope
