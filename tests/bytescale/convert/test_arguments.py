"""Hugging Face configurations from Megatron's arguments, and models without a family."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest

from megatron.bytescale.arguments.options import options_of
from megatron.bytescale.convert.arguments import TrainedModel, configuration, kind_of

LATENT: dict[str, Any] = {
    "multi_latent_attention": True, "qk_layernorm": True, "layernorm_epsilon": 1e-6, "num_experts": 4,
    "moe_ffn_hidden_size": 48, "moe_router_topk": 2, "moe_aux_loss_coeff": 0.001, "moe_router_pre_softmax": True,
    "moe_layer_freq": [0, 1], "moe_shared_expert_intermediate_size": 96, "moe_router_topk_scaling_factor": None,
    "q_lora_rank": None, "kv_lora_rank": 32, "qk_head_dim": 16, "qk_pos_emb_head_dim": 8, "v_head_dim": 12,
    "rope_type": "rope",
}  # fmt: skip
BIASED: dict[str, Any] = {
    "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True, "moe_router_topk": 4,
    "moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_router_topk_scaling_factor": 2.5,
}  # fmt: skip
GLM: dict[str, Any] = {
    **BIASED, "num_experts": 4, "moe_ffn_hidden_size": 48, "moe_aux_loss_coeff": 1e-4, "moe_layer_freq": [0, 1],
    "moe_shared_expert_intermediate_size": 48, "moe_router_num_groups": None, "rotary_percent": 0.5,
    "add_qkv_bias": True,
}  # fmt: skip
GPT_OSS: dict[str, Any] = {
    "swiglu": False, "quick_geglu": True, "add_bias_linear": True, "softmax_type": "learnable", "num_experts": 4,
    "glu_linear_offset": 1.0, "activation_func_clamp_value": 7.0, "moe_ffn_hidden_size": 48, "moe_router_topk": 2,
    "moe_aux_loss_coeff": 0.01, "moe_router_pre_softmax": False, "window_attn_skip_freq": 2, "window_size": (15, 0),
}  # fmt: skip


def arguments(**changes: Any) -> TrainedModel:
    """Return Megatron's arguments of a plain model."""
    given = {
        "swiglu": True, "normalization": "RMSNorm", "position_embedding_type": "rope", "add_bias_linear": False,
        "add_qkv_bias": False, "qk_layernorm": False, "num_experts": None, "window_size": None,
        "group_query_attention": False, "num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 96,
        "num_attention_heads": 4, "kv_channels": 16, "padded_vocab_size": 128, "max_position_embeddings": 256,
        "layernorm_epsilon": 1e-5, "untie_embeddings_and_output_weights": True, "rotary_base": 10000,
        "use_rope_scaling": False, "rotary_seq_len_interpolation_factor": None, "params_dtype": "torch.bfloat16",
    }  # fmt: skip
    return options_of(Namespace(**{**given, **changes}), TrainedModel)


@pytest.mark.parametrize(
    ("changes", "kind"),
    [({"qk_layernorm": True}, "qwen3"), ({"add_qkv_bias": True}, "qwen2"), ({"num_experts": 4}, "mixtral"),
     ({"num_experts": 4, "qk_layernorm": True}, "qwen3_moe"), (LATENT, "deepseek_v2"), (GPT_OSS, "gpt_oss"),
     ({**LATENT, **BIASED}, "deepseek_v3"), (GLM, "glm4_moe")],
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
        ({"position_embedding_type": "none"}, "position_embedding_type 'none' cannot be converted: only 'rope' and"),
        ({"moe_router_topk_scaling_factor": 2.5}, "moe_router_topk_scaling_factor 2.5"),
        ({"activation_func_clamp_value": 7.0}, "activation_func_clamp_value 7.0"),
        ({**LATENT, "qk_layernorm": False}, "qk_layernorm False cannot be converted: only True"),
        ({**LATENT, "layernorm_epsilon": 1e-5}, "layernorm_epsilon 1e-05"),
        ({**LATENT, "num_experts": None}, "a model like deepseek_v2 without experts"),
        ({**LATENT, "position_embedding_type": "yarn"}, "position_embedding_type 'yarn' cannot be converted: only 'r"),
        ({**GPT_OSS, "softmax_type": "vanilla"}, "softmax_type 'vanilla' cannot be converted: only 'learnable'"),
        ({**GPT_OSS, "glu_linear_offset": 0.0}, "glu_linear_offset 0.0 cannot be converted: only 1.0"),
        ({**GPT_OSS, "activation_func_clamp_value": None}, "needs --activation-func-clamp-value"),
        ({"add_qkv_bias": True, "num_experts": 4}, "query, key and value biases"),
        ({**GLM, "moe_router_enable_expert_bias": False}, "moe_router_enable_expert_bias False cannot be .* only True"),
        ({**GLM, "position_embedding_type": "yarn"}, "position_embedding_type 'yarn' cannot be converted: only 'rope'"),
        ({**LATENT, **BIASED, "rotary_percent": 0.5}, "rotary_percent 0.5 cannot be converted: only 1.0"),
    ],
)
def test_models_of_no_family_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind_of(arguments(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"moe_layer_freq": [1, 0]}, r"moe_layer_freq \[1, 0\]: layers without experts can be"),
        ({"moe_layer_freq": 2, "num_layers": 4}, "moe_layer_freq 2: layers without experts"),
        ({"moe_shared_expert_intermediate_size": 50}, "only a multiple of moe_ffn_hidden_size 48"),
        ({"moe_shared_expert_intermediate_size": None}, "moe_shared_expert_intermediate_size None: only a multiple"),
    ],
)
def test_experts_that_deepseek_has_not(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        configuration(arguments(**{**LATENT, **changes}))


def test_a_choice_by_bias_has_groups_of_two_experts() -> None:
    biased = configuration(arguments(**LATENT | BIASED))
    assert {biased["n_group"], biased["topk_group"], biased["num_nextn_predict_layers"]} == {4, 2, 0}
    glm = configuration(arguments(**GLM))
    assert (glm["n_group"], glm["attention_bias"], glm["use_qk_norm"]) == (1, True, False)
    assert glm["rope_parameters"] == {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    with pytest.raises(ValueError, match="moe_router_group_topk 1: only half of moe_router_topk 4"):
        configuration(arguments(**LATENT | BIASED | {"moe_router_group_topk": 1}))
