"""Model families, and Megatron's flags for a Hugging Face configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from bytescale_ext.convert.layout import CheckpointLayout
from megatron.bytescale.convert.rotary import HuggingFaceConfig, position_flags


@dataclass(frozen=True)
class Family:
    """The family of models with the same ``model_type``.

    Attributes:
        qkv_bias: whether queries, keys and values have biases.
        all_biases: whether all products have biases.
        qk_norm: whether queries and keys have norms.
        is_latent: whether attention is multi-latent; latents have norms.
        num_experts: configuration key of the number of experts; "" for a dense family.
        expert_width: configuration key of an expert's width.
        options: configuration keys of properties above that only some models of the family have, by property.
        has_partial_positions: whether ``partial_rotary_factor`` is the part of a head with positions.
        names: tensor names that differ from Llama's, and settings that affect names; see ``CheckpointLayout``.
        needed: configuration values that Megatron's model requires; models with other values cannot be converted.
    """

    qkv_bias: bool = False
    all_biases: bool = False
    qk_norm: bool = False
    is_latent: bool = False
    num_experts: str = ""
    expert_width: str = ""
    options: Mapping[str, str] = field(default_factory=dict)
    has_partial_positions: bool = False
    names: HuggingFaceConfig = field(default_factory=dict)
    needed: Mapping[str, object] = field(default_factory=dict)


_OF_DEEPSEEK: Final = {"moe_layer_freq": 1, "rms_norm_eps": 1e-6}
"""Needed values of DeepSeek. Norms of latents have epsilon 1e-6 in transformers, and the model's in Megatron."""
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
    "deepseek_v2": Family(
        is_latent=True,
        num_experts="n_routed_experts",
        expert_width="moe_intermediate_size",
        names={"has_shared": True},
        needed={**_OF_DEEPSEEK, "topk_method": "greedy", "norm_topk_prob": False, "scoring_func": "softmax"},
    ),
    "deepseek_v3": Family(
        is_latent=True,
        num_experts="n_routed_experts",
        expert_width="moe_intermediate_size",
        names={"has_shared": True, "has_expert_bias": True},
        needed={**_OF_DEEPSEEK, "topk_method": "noaux_tc", "norm_topk_prob": True, "scoring_func": "sigmoid",
                "rope_interleave": True},
    ),
    "glm4_moe": Family(
        num_experts="n_routed_experts",
        expert_width="moe_intermediate_size",
        options={"qkv_bias": "attention_bias", "qk_norm": "use_qk_norm"},
        has_partial_positions=True,
        names={"has_shared": True, "has_expert_bias": True},
        needed={"norm_topk_prob": True},
    ),
    "gpt_oss": Family(
        all_biases=True,
        num_experts="num_local_experts",
        expert_width="intermediate_size",
        names={"router": "mlp.router", "has_sinks": True, "is_stacked": True},
        needed={"attention_bias": True, "swiglu_alpha": 1.702},
    ),
}  # fmt: skip
BALANCE: Final = 1e-4
"""Weight of the balancing loss of models with a bias for each expert. Their configurations lack it (DeepSeek-V3,
arXiv 2412.19437, section 4.2; GLM-4.5, arXiv 2508.06471, section 2.4)."""
GPT_OSS_LIMIT: Final = 7.0
"""Limit of the gates of gpt-oss in a configuration that has none."""
NEEDED: Final = {
    "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
"""Required values of every configuration, unless its family overrides them."""
READ_BY: Final = {
    "sliding_window": ("mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gpt_oss"),
    "use_sliding_window": ("qwen2", "qwen3", "qwen3_moe"),
    "max_window_layers": ("qwen2", "qwen3"),
    "layer_types": ("qwen2", "qwen3", "gpt_oss"),
    "attention_bias": ("llama", "qwen3", "qwen3_moe", "deepseek_v2", "deepseek_v3", "glm4_moe", "gpt_oss"),
    "mlp_bias": ("llama", "deepseek_v2"),
    "decoder_sparse_step": ("qwen3_moe",), "mlp_only_layers": ("qwen3_moe",),
    "norm_topk_prob": ("qwen3_moe", "deepseek_v2", "deepseek_v3", "glm4_moe"),
    "first_k_dense_replace": ("deepseek_v2", "deepseek_v3", "glm4_moe"),
    "routed_scaling_factor": ("deepseek_v2", "deepseek_v3", "glm4_moe"),
    "n_group": ("deepseek_v3", "glm4_moe"), "topk_group": ("deepseek_v3", "glm4_moe"),
    "aux_loss_alpha": ("deepseek_v2",), "q_lora_rank": ("deepseek_v2", "deepseek_v3"), "swiglu_limit": ("gpt_oss",),
}  # fmt: skip
"""Configuration keys that only the classes of some families read in transformers; the other classes ignore them."""
GEMMA3: Final = (
    "cannot be converted: Megatron 0.19.2 has no norms after attention and MLP, no scaled embeddings, no GeGLU, and "
    "one rotary base for all layers"
)


def family_of(config: HuggingFaceConfig) -> Family:
    """Return the family of a configuration, with its options. Raises ValueError if the table has none."""
    kind = config.get("model_type")
    if kind in ("gemma3", "gemma3_text"):
        raise ValueError(f"model_type {kind!r} {GEMMA3}")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ValueError(f"model_type {kind!r} cannot be converted; these can: {', '.join(FAMILIES)}")
    family = FAMILIES[kind]
    given = {name: bool(config.get(key)) for name, key in family.options.items()}
    return replace(
        family, qkv_bias=given.get("qkv_bias", family.qkv_bias), qk_norm=given.get("qk_norm", family.qk_norm)
    )


def as_read(config: HuggingFaceConfig) -> HuggingFaceConfig:
    """Return a configuration without the keys that its class in transformers ignores. Raises like ``family_of``."""
    family_of(config)
    kind = config["model_type"]
    return {name: value for name, value in config.items() if name not in READ_BY or kind in READ_BY[name]}


def layout_of(config: HuggingFaceConfig) -> CheckpointLayout:
    """Return the layout that determines tensor names for a configuration. Raises ValueError like ``family_of``."""
    config = as_read(config)
    family = family_of(config)
    latent = "queries" if config.get("q_lora_rank") else "keys"
    return CheckpointLayout(
        num_layers=config["num_hidden_layers"],
        num_groups=config["num_key_value_heads"],
        head_dim=head_dim_of(config),
        is_tied=config["tie_word_embeddings"],
        qkv_bias=family.qkv_bias or family.all_biases,
        qk_norm=family.qk_norm,
        proj_bias=family.all_biases,
        latent=latent if family.is_latent else "",
        num_experts=config[family.num_experts] if family.num_experts else 0,
        num_dense=config.get("first_k_dense_replace", 0),
        **family.names,
    )


def head_dim_of(config: HuggingFaceConfig) -> int:
    """Return the size of an attention head."""
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def model_flags(config: HuggingFaceConfig) -> list[str]:
    """Return Megatron's flags for the model of a configuration.

    Raises ValueError for a model that Megatron would compute differently.
    """
    config = as_read(config)
    family = family_of(config)
    _check(config, family)
    flags = {
        "--num-layers": config["num_hidden_layers"],
        "--hidden-size": config["hidden_size"],
        "--ffn-hidden-size": config["intermediate_size"],
        "--num-attention-heads": config["num_attention_heads"],
        "--max-position-embeddings": config["max_position_embeddings"],
        "--normalization": "RMSNorm",
        "--norm-epsilon": config["rms_norm_eps"],
        "--attention-dropout": 0,
        "--hidden-dropout": 0,
    }
    words = [] if config["tie_word_embeddings"] else ["--untie-embeddings-and-output-weights"]
    words += [] if family.all_biases else ["--disable-bias-linear"]
    words += ["--add-qkv-bias"] if family.qkv_bias else []
    if config["model_type"] == "gpt_oss":
        words += ["--quick-geglu", "--glu-linear-offset", "1.0"]
        flags["--activation-func-clamp-value"] = config.get("swiglu_limit", GPT_OSS_LIMIT)
    else:
        words += ["--swiglu"]
    words += _latent_flags(config) if family.is_latent else _head_flags(config, family)
    words += position_flags(config["rope_parameters"], family.is_latent, family.has_partial_positions)
    words += _expert_flags(config, family) if family.num_experts else []
    if family.num_experts or family.is_latent:  # TransformerEngine names these norms differently
        words += ["--transformer-impl", "local"]
    return [str(word) for pair in flags.items() for word in pair] + words


def _head_flags(config: HuggingFaceConfig, family: Family) -> list[str]:
    """Return the flags of standard attention."""
    words = ["--group-query-attention", "--num-query-groups", str(config["num_key_value_heads"])]
    words += ["--kv-channels", str(head_dim_of(config))]
    words += ["--qk-layernorm"] if family.qk_norm else []
    words += ["--softmax-type", "learnable"] if family.names.get("has_sinks") else []
    window = window_of(config)
    if window is None:
        return words
    sees_less = [kind == "sliding_attention" for kind in _layer_types(config)]
    words += ["--window-size", f"{window - 1},0"]
    if all(sees_less):
        return words
    every_other = [layer % 2 == 0 for layer in range(len(sees_less))]
    pattern = "2" if sees_less == every_other else str([int(has_window) for has_window in sees_less]).replace(" ", "")
    return [*words, "--window-attn-skip-freq", pattern]


def _latent_flags(config: HuggingFaceConfig) -> list[str]:
    """Return the flags of latent attention."""
    sizes = {
        "--kv-lora-rank": "kv_lora_rank", "--qk-head-dim": "qk_nope_head_dim",
        "--qk-pos-emb-head-dim": "qk_rope_head_dim", "--v-head-dim": "v_head_dim",
    }  # fmt: skip
    words = ["--multi-latent-attention", "--qk-layernorm"]
    words += ["--q-lora-rank", str(config["q_lora_rank"])] if config["q_lora_rank"] else []
    return words + [word for flag, name in sizes.items() for word in (flag, str(config[name]))]


def _expert_flags(config: HuggingFaceConfig, family: Family) -> list[str]:
    """Return the flags of a mixture of experts. Raises ValueError if no layer has experts."""
    flags = {
        "--num-experts": config[family.num_experts],
        "--moe-ffn-hidden-size": config[family.expert_width],
        "--moe-router-topk": config["num_experts_per_tok"],
        "--moe-router-load-balancing-type": "seq_aux_loss" if config.get("seq_aux") else "aux_loss",
        "--moe-aux-loss-coeff": config.get("router_aux_loss_coef", config.get("aux_loss_alpha", 0.001)),
    }
    num_dense, num_layers = config.get("first_k_dense_replace", 0), config["num_hidden_layers"]
    if num_dense:
        if num_dense >= num_layers:
            raise ValueError(f"first_k_dense_replace is {num_dense}: a model without experts cannot be converted")
        flags["--moe-layer-freq"] = f"[0]*{num_dense}+[1]*{num_layers - num_dense}"
    if family.names.get("has_shared"):
        flags["--moe-shared-expert-intermediate-size"] = config["n_shared_experts"] * config[family.expert_width]
    if config.get("routed_scaling_factor", 1.0) != 1.0:
        flags["--moe-router-topk-scaling-factor"] = config["routed_scaling_factor"]
    words = [] if config.get("norm_topk_prob", True) else ["--moe-router-pre-softmax"]
    if family.names.get("has_expert_bias"):
        flags |= {"--moe-router-load-balancing-type": "seq_aux_loss", "--moe-aux-loss-coeff": BALANCE}
        words += _bias_flags(config)
    return words + [str(word) for pair in flags.items() for word in pair]


def _bias_flags(config: HuggingFaceConfig) -> list[str]:
    """Return the flags of a router whose choice follows a bias, in groups of experts if there are several groups.

    Raises ValueError for groups that Megatron would choose differently. Both choose groups by the sum of the largest
    scores of a group: the two largest in transformers, and ``topk / groups`` in Megatron.
    """
    words = "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-dtype fp32".split()
    groups, chosen, topk = (config[name] for name in ("n_group", "topk_group", "num_experts_per_tok"))
    if groups == 1:
        return words
    if topk != 2 * chosen:
        raise ValueError(f"topk_group is {chosen}: only half of num_experts_per_tok {topk} can be converted")
    return [*words, "--moe-router-num-groups", str(groups), "--moe-router-group-topk", str(chosen)]


def window_of(config: HuggingFaceConfig) -> int | None:
    """Return the window of layers with a sliding window, in tokens including the token itself; None without windows."""
    if not config.get("use_sliding_window", True) or "sliding_attention" not in _layer_types(config):
        return None
    window: int | None = config.get("sliding_window")
    return window


def _layer_types(config: HuggingFaceConfig) -> list[str]:
    """Return the kinds of attention of the layers; a single kind stands for all layers.

    Versions of transformers before 4.53 have no ``layer_types``: Qwen's layers from ``max_window_layers`` on have the
    window.
    """
    types: list[str] = config.get("layer_types") or []
    has_window = config.get("use_sliding_window", True) and config.get("sliding_window")
    if types or not has_window or config.get("max_window_layers") is None:
        return types or ["sliding_attention"]
    first, num_layers = config["max_window_layers"], config["num_hidden_layers"]
    return ["full_attention" if layer < first else "sliding_attention" for layer in range(num_layers)]


def _check(config: HuggingFaceConfig, family: Family) -> None:
    """Raise ValueError for quantized tensors and for settings that Megatron's model would ignore."""
    needed = {**NEEDED, **family.needed}
    for name, value in needed.items():
        if name in family.options.values():
            continue
        actual = config.get(name, value)
        if actual != value and actual is not None:
            raise ValueError(f"{name} is {actual!r}: only {value!r} can be converted")
    if len(set(_layer_types(config))) > 1 and config["model_type"] != "gpt_oss":
        raise ValueError("layers with and without a sliding window cannot be converted")
    if quantized := config.get("quantization_config"):
        method = dict(quantized).get("quant_method", "quantized")
        raise ValueError(f"{method} tensors cannot be converted: save the model in bf16 first, without quantization")
