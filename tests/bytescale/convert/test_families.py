"""Megatron flags from a Hugging Face configuration, and refused configurations."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.bytescale.convert.families import model_flags, window_of
from tests.bytescale.convert.models import LLAMA3, MODELS, PLAIN_ROPE, YARN, configuration_of


def value(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


@pytest.mark.parametrize(
    ("types", "pattern"),
    [("sfsf", "2"), ("sffs", "[1,0,0,1]"), ("fsfs", "[0,1,0,1]"), ("ssss", None), ("ffff", "no window")],
)
def test_layers_with_windows(types: str, pattern: str | None) -> None:
    names = {"s": "sliding_attention", "f": "full_attention"}
    words = model_flags(configuration_of("gpt_oss", layer_types=[names[one] for one in types]))
    assert ("--window-size" in words) == (pattern != "no window")
    if pattern in (None, "no window"):
        assert "--window-attn-skip-freq" not in words
    else:
        assert value(words, "--window-attn-skip-freq") == pattern


@pytest.mark.parametrize("kind", ["gemma3", "gemma3_text"])
def test_gemma_is_refused_with_what_megatron_lacks(kind: str) -> None:
    with pytest.raises(ValueError, match=f"'{kind}' cannot be converted: Megatron .* has no norms after") as caught:
        model_flags({"model_type": kind})
    assert "\n" not in str(caught.value)
    assert all(part in str(caught.value) for part in ("scaled embeddings", "GeGLU", "one rotary base"))


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("gpt2", {}, r"model_type 'gpt2' cannot be converted; these can: llama, "),
        ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu': only 'silu' can be converted"),
        ("llama", {"attention_bias": True}, "attention_bias is True"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, r"mlp_only_layers is \[0\]"),
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, "with and without a sliding window"),
        ("llama", {"rope_parameters": {**LLAMA3, "low_freq_factor": 2.0}}, "rotary positions .* cannot be converted"),
        ("llama", {"rope_parameters": {"rope_theta": 1e4, "rope_type": "longrope"}}, "rotary positions"),
        ("gpt_oss", {"attention_bias": False}, "attention_bias is False: only True"),
        ("gpt_oss", {"swiglu_alpha": 1.0}, "swiglu_alpha is 1.0: only 1.702"),
        ("gpt_oss", {"quantization_config": {"quant_method": "mxfp4"}}, "mxfp4 tensors cannot be .* in bf16 first"),
        ("deepseek_v2", {"topk_method": "group_limited_greedy"}, "topk_method is 'group_limited_greedy': only 'gre"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob is True"),
        ("deepseek_v2", {"rms_norm_eps": 1e-5}, "rms_norm_eps is 1e-05: only 1e-06"),
        ("deepseek_v2", {"first_k_dense_replace": 3}, "first_k_dense_replace is 3: a model without experts"),
        ("deepseek_v3", {"topk_group": 1}, "topk_group is 1: only half of num_experts_per_tok 4"),
        ("deepseek_v3", {"norm_topk_prob": False}, "norm_topk_prob is False: only True"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave is False: only True"),
        ("deepseek_v3", {"attention_bias": True}, "attention_bias is True: only False"),
        ("deepseek_v3", {"quantization_config": {"quant_method": "fp8"}}, "fp8 tensors cannot be"),
        ("glm4_moe", {"rope_parameters": {**YARN, "partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ("llama", {"rope_parameters": {**PLAIN_ROPE, "partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
    ],
)
def test_what_megatron_would_compute_otherwise_is_refused(kind: str, changes: dict[str, Any], message: str) -> None:
    config = {**configuration_of("llama" if kind not in MODELS else kind), "model_type": kind, **changes}
    with pytest.raises(ValueError, match=message):
        model_flags(config)


def test_properties_that_only_some_models_of_a_family_have() -> None:
    """GLM-4.5 has norms of queries and keys, GLM-4.5-Air has none; DeepSeek-V3 chooses groups of experts first."""
    words = model_flags(configuration_of("glm4_moe"))
    assert {"--add-qkv-bias", "--qk-layernorm"} <= {*words}
    assert value(words, "--rotary-percent") == "0.5"
    plain = model_flags(configuration_of("glm4_moe", attention_bias=False, use_qk_norm=False))
    assert not {"--add-qkv-bias", "--qk-layernorm", "--moe-router-num-groups"} & {*plain}
    groups = model_flags(configuration_of("deepseek_v3"))
    assert (value(groups, "--moe-router-num-groups"), value(groups, "--moe-router-group-topk")) == ("4", "2")


IGNORED: dict[str, list[dict[str, Any]]] = {
    "llama": [{"sliding_window": 8}, {"swiglu_limit": 7.0}, {"layer_types": ["full_attention", "sliding_attention"]}],
    "mistral": [{"use_sliding_window": False}, {"attention_bias": True}, {"mlp_bias": True}],
    "qwen2": [{"sliding_window": 8, "use_sliding_window": False, "max_window_layers": 1}, {"attention_bias": True}],
    "qwen3": [{"sliding_window": 8, "use_sliding_window": False}, {"mlp_only_layers": [0]}],
    "mixtral": [{"norm_topk_prob": False}, {"routed_scaling_factor": 2.0}, {"first_k_dense_replace": 1}],
    "qwen3_moe": [{"first_k_dense_replace": 1}, {"layer_types": ["full_attention", "sliding_attention"]}],
}


@pytest.mark.parametrize("kind", IGNORED)
def test_keys_that_the_class_ignores_change_nothing(kind: str) -> None:
    for keys in IGNORED[kind]:
        assert model_flags(configuration_of(kind, **keys)) == model_flags(configuration_of(kind)), keys


def test_the_layers_of_a_window_before_transformers_has_their_kinds() -> None:
    keys: dict[str, Any] = {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 0}
    assert value(model_flags(configuration_of("qwen2", **keys)), "--window-size") == "7,0"
    assert "--window-size" not in model_flags(configuration_of("qwen2", **{**keys, "max_window_layers": 2}))
    with pytest.raises(ValueError, match="with and without a sliding window"):
        model_flags(configuration_of("qwen2", **{**keys, "max_window_layers": 1}))


def test_a_window_counts_only_where_it_is_used() -> None:
    assert window_of({"sliding_window": 8}) == 8
    assert window_of({"sliding_window": 8, "use_sliding_window": False}) is None
    assert window_of({"sliding_window": 8, "layer_types": ["full_attention"]}) is None
    assert window_of({}) is None
