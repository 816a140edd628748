"""Tensors of a Hugging Face model and of Megatron: each is used once, in both directions."""

from __future__ import annotations

import pytest
import torch

from bytescale_ext.convert.layout import CheckpointLayout
from bytescale_ext.convert.tensors import tensor_mappings, to_hugging_face, to_megatron
from megatron.bytescale.convert.families import layout_of
from tests.bytescale.convert.models import MODELS, configuration_of


@pytest.mark.parametrize("kind", MODELS)
def test_names_are_used_once(kind: str) -> None:
    mappings = list(tensor_mappings(layout_of(configuration_of(kind))))
    hf_names = [name for mapping in mappings for name in mapping.hf_names]
    names = [name for mapping in mappings for name in mapping.names]
    assert len(set(names)) == len(names)
    assert len(set(hf_names)) == len(hf_names)
    assert all(name.startswith(("model.", "lm_head.")) for name in hf_names)
    assert ("lm_head.weight" in hf_names) == (not MODELS[kind]["tie_word_embeddings"])


def hf_names_of(kind: str) -> dict[str, tuple[str, ...]]:
    mappings = tensor_mappings(layout_of(configuration_of(kind)))
    return {name: mapping.hf_names for mapping in mappings for name in mapping.names}


def test_names_of_experts() -> None:
    names = {kind: hf_names_of(kind) for kind in MODELS}
    fc1 = "decoder.layers.1.mlp.experts.local_experts.3.linear_fc1.weight"
    hf_expert = "model.layers.1.block_sparse_moe.experts.3."
    assert names["mixtral"][fc1] == (f"{hf_expert}w1.weight", f"{hf_expert}w3.weight")
    assert names["qwen3_moe"]["decoder.layers.0.mlp.router.weight"] == ("model.layers.0.mlp.gate.weight",)


def test_names_of_latent_attention() -> None:
    lite, full = (hf_names_of(kind) for kind in ("deepseek_v2_lite", "deepseek_v2"))
    assert lite["decoder.layers.0.self_attention.linear_q_proj.weight"] == ("model.layers.0.self_attn.q_proj.weight",)
    assert "decoder.layers.0.mlp.linear_fc1.weight" in lite, "the first layer is dense"
    assert lite["decoder.layers.1.mlp.shared_experts.linear_fc2.weight"] == (
        "model.layers.1.mlp.shared_experts.down_proj.weight",
    )
    first_layer = "model.layers.0.self_attn"
    modules = {name.split(".")[4] for names in full.values() for name in names if name.startswith(first_layer)}
    assert modules == {
        "q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj",
    }  # fmt: skip


def test_stacked_experts_there_and_back() -> None:
    layout = layout_of(configuration_of("gpt_oss", num_hidden_layers=1))
    experts = "model.layers.0.mlp.experts."
    names = [name for mapping in tensor_mappings(layout) for name in mapping.hf_names]
    given = {name: torch.randn(96) for name in names if "self_attn" not in name}
    given |= {f"model.layers.0.self_attn.{one}_proj.{kind}": torch.randn(32) for one in "qkvo"
              for kind in ("weight", "bias")}  # fmt: skip
    given |= {f"model.layers.0.self_attn.q_proj.{kind}": torch.randn(64) for kind in ("weight", "bias")}
    given |= {
        "model.layers.0.self_attn.sinks": torch.randn(4), f"{experts}gate_up_proj": torch.randn(4, 8, 12),
        f"{experts}gate_up_proj_bias": torch.randn(4, 12), f"{experts}down_proj": torch.randn(4, 6, 8),
        f"{experts}down_proj_bias": torch.randn(4, 8),
    }  # fmt: skip
    ours = dict(to_megatron(layout, given.__getitem__))
    third = "decoder.layers.0.mlp.experts.local_experts.2."
    assert torch.equal(ours[f"{third}linear_fc1.weight"][1], given[f"{experts}gate_up_proj"][2, :, 2])
    assert torch.equal(ours[f"{third}linear_fc2.bias"], given[f"{experts}down_proj_bias"][2])
    back = to_hugging_face(layout, ours)
    assert back.keys() == given.keys()
    assert all(torch.equal(back[name], given[name]) for name in given)
    given[f"{experts}down_proj"] = torch.randn(3, 6, 8)
    with pytest.raises(ValueError, match=f"{experts}down_proj has 3 experts, not 4"):
        dict(to_megatron(layout, given.__getitem__))


def test_a_model_without_layers_is_its_embedding_norm_and_output() -> None:
    layout = CheckpointLayout(num_layers=0, num_groups=1, head_dim=1, is_tied=False, qkv_bias=False, qk_norm=False)
    assert [mapping.hf_names for mapping in tensor_mappings(layout)] == [
        ("model.embed_tokens.weight",), ("model.norm.weight",), ("lm_head.weight",),
    ]  # fmt: skip


def test_there_and_back() -> None:
    layout = layout_of(configuration_of("qwen2"))
    sizes = {"q_proj": 64, "k_proj": 32, "v_proj": 32}
    given = {
        name: torch.randn(next((size for projection, size in sizes.items() if projection in name), 96))
        for mapping in tensor_mappings(layout)
        for name in mapping.hf_names
    }
    ours = dict(to_megatron(layout, given.__getitem__))
    assert torch.equal(
        ours["decoder.layers.0.mlp.linear_fc1.weight"][:96], given["model.layers.0.mlp.gate_proj.weight"]
    )
    back = to_hugging_face(layout, ours)
    assert back.keys() == given.keys()
    assert all(torch.equal(back[name], given[name]) for name in given)


@pytest.mark.parametrize("shape", [(32, 64), (1, 2), ()])
def test_heads_that_the_tensors_do_not_have_are_named(shape: tuple[int, ...]) -> None:
    layout = layout_of(configuration_of("llama", num_key_value_heads=3, num_attention_heads=3))
    with pytest.raises(ValueError, match=r"than config\.json says: model\.layers\.0\.self_attn\.q_proj"):
        dict(to_megatron(layout, lambda name: torch.zeros(shape)))
