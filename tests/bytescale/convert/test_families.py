"""Megatron's flags of a Hugging Face configuration, the configuration of Megatron's arguments, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron.bytescale.convert.families import configuration, head_dim_of, kind_of, layout_of, model_flags, window_of
from tests.bytescale.convert.models import LLAMA3, MODELS, configuration_of


def value(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


def test_flags_of_a_dense_model() -> None:
    words = model_flags(configuration_of("llama"))
    assert value(words, "--rotary-base") == "500000"
    assert value(words, "--rope-scaling-factor") == "8.0"
    assert value(words, "--kv-channels") == "16"
    assert {"--untie-embeddings-and-output-weights", "--use-rope-scaling", "--swiglu"} <= set(words)
    assert not {"--qk-layernorm", "--add-qkv-bias", "--window-size", "--num-experts"} & set(words)


def test_flags_that_differ() -> None:
    words = {kind: model_flags(configuration_of(kind)) for kind in MODELS}
    assert value(words["mistral"], "--window-size") == "15,0"
    assert "--add-qkv-bias" in words["qwen2"]
    assert "--untie-embeddings-and-output-weights" not in words["qwen2"]
    assert value(words["qwen2"], "--rotary-seq-len-interpolation-factor") == "2"
    assert "--qk-layernorm" in words["qwen3"]
    assert value(words["qwen3_moe"], "--moe-ffn-hidden-size") == "48"
    assert value(words["mixtral"], "--moe-ffn-hidden-size") == "96"
    assert "--moe-router-pre-softmax" in words["qwen3_moe"]
    assert "--moe-router-pre-softmax" not in words["mixtral"]


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("gpt2", {}, r"model_type 'gpt2' cannot be converted; these can: llama, "),
        ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu': only 'silu' can be converted"),
        ("llama", {"attention_bias": True}, "attention_bias is True"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, r"mlp_only_layers is \[0\]"),
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, "with and without a sliding window"),
        ("llama", {"rope_parameters": {**LLAMA3, "low_freq_factor": 2.0}}, "rotary positions .* cannot be converted"),
        ("llama", {"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn"}}, "rotary positions"),
        ("llama", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ],
)
def test_what_megatron_would_compute_otherwise_is_refused(kind: str, changes: dict[str, Any], message: str) -> None:
    config = {**configuration_of("llama" if kind not in MODELS else kind), "model_type": kind, **changes}
    with pytest.raises(ValueError, match=message):
        model_flags(config)


def test_a_window_counts_only_where_it_is_used() -> None:
    assert window_of({"sliding_window": 8}) == 8
    assert window_of({"sliding_window": 8, "use_sliding_window": False}) is None
    assert window_of({}) is None


def test_a_head_has_the_hidden_size_over_heads_unless_told() -> None:
    assert head_dim_of(configuration_of("llama")) == 16
    assert head_dim_of(configuration_of("qwen3")) == 24
    assert layout_of(configuration_of("qwen3")).head_dim == 24


def arguments(**changes: Any) -> Any:
    """Return Megatron's arguments of a plain model."""
    given = {
        "swiglu": True, "normalization": "RMSNorm", "position_embedding_type": "rope", "add_bias_linear": False,
        "add_qkv_bias": False, "qk_layernorm": False, "num_experts": None, "window_size": None,
        "group_query_attention": False, "num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 96,
        "num_attention_heads": 4, "kv_channels": 16, "padded_vocab_size": 128, "max_position_embeddings": 256,
        "layernorm_epsilon": 1e-5, "untie_embeddings_and_output_weights": True, "rotary_base": 10000,
        "use_rope_scaling": False, "rotary_seq_len_interpolation_factor": None, "params_dtype": "torch.bfloat16",
    }  # fmt: skip
    return SimpleNamespace(**{**given, **changes})


def test_the_configuration_of_arguments() -> None:
    config = configuration(arguments())
    assert (config["model_type"], config["num_key_value_heads"], config["dtype"]) == ("llama", 4, "bfloat16")
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}
    windowed = configuration(arguments(window_size=(15, 0)))
    assert (windowed["model_type"], windowed["sliding_window"]) == ("mistral", 16)


@pytest.mark.parametrize(
    ("changes", "kind"),
    [({"qk_layernorm": True}, "qwen3"), ({"add_qkv_bias": True}, "qwen2"), ({"num_experts": 4}, "mixtral"),
     ({"num_experts": 4, "qk_layernorm": True}, "qwen3_moe")],
)  # fmt: skip
def test_the_kind_of_a_model(changes: dict[str, Any], kind: str) -> None:
    assert kind_of(arguments(**changes)) == kind


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"swiglu": False}, "a model with swiglu False cannot be converted: only True"),
        ({"normalization": "LayerNorm"}, "normalization 'LayerNorm'"),
        ({"softmax_type": "learnable"}, "softmax_type 'learnable'"),
        ({"window_attn_skip_freq": 2}, "window_attn_skip_freq 2"),
        ({"add_qkv_bias": True, "num_experts": 4}, "biases of queries, keys and values"),
    ],
)
def test_models_of_no_family_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind_of(arguments(**changes))
