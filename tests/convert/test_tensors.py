"""Which tensors of a Hugging Face model make Megatron's: each once, in both directions."""

from __future__ import annotations

import pytest
import torch

from bytescale_ext.convert.layout import Layout
from bytescale_ext.convert.tensors import rows, to_hugging_face, to_megatron
from megatron.bytescale.convert.families import layout_of
from tests.bytescale.convert.models import MODELS, configuration_of


@pytest.mark.parametrize("kind", MODELS)
def test_names_are_used_once(kind: str) -> None:
    table = list(rows(layout_of(configuration_of(kind))))
    parts = [part for row in table for part in row.parts]
    names = [name for row in table for name in row.names]
    assert len(set(names)) == len(names)
    assert len(set(parts)) == len(parts)
    assert all(part.startswith(("model.", "lm_head.")) for part in parts)
    assert ("lm_head.weight" in parts) == (not MODELS[kind]["tie_word_embeddings"])


def test_names_of_experts() -> None:
    names = {
        kind: {name: row.parts for row in rows(layout_of(configuration_of(kind))) for name in row.names}
        for kind in MODELS
    }
    fc1 = "decoder.layers.1.mlp.experts.local_experts.3.linear_fc1.weight"
    theirs = "model.layers.1.block_sparse_moe.experts.3."
    assert names["mixtral"][fc1] == (f"{theirs}w1.weight", f"{theirs}w3.weight")
    assert names["qwen3_moe"]["decoder.layers.0.mlp.router.weight"] == ("model.layers.0.mlp.gate.weight",)


def test_names_of_latent_attention() -> None:
    lite, full = ([*rows(layout_of(configuration_of(kind)))] for kind in ("deepseek_v2_lite", "deepseek_v2"))
    parts = {name: row.parts for row in lite for name in row.names}
    assert parts["decoder.layers.0.self_attention.linear_q_proj.weight"] == ("model.layers.0.self_attn.q_proj.weight",)
    assert "decoder.layers.0.mlp.linear_fc1.weight" in parts, "the first layer is dense"
    assert parts["decoder.layers.1.mlp.shared_experts.linear_fc2.weight"] == (
        "model.layers.1.mlp.shared_experts.down_proj.weight",
    )
    of_first = {part.split(".")[4] for row in full for part in row.parts if part.startswith("model.layers.0.self_attn")}
    assert of_first == {
        "q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj",
    }  # fmt: skip


def test_stacked_experts_there_and_back() -> None:
    layout = layout_of(configuration_of("gpt_oss", num_hidden_layers=1))
    experts = "model.layers.0.mlp.experts."
    given = {part: torch.randn(96) for row in rows(layout) for part in row.parts if "self_attn" not in part}
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
    layout = Layout(num_layers=0, num_groups=1, head_dim=1, is_tied=False, qkv_bias=False, qk_norm=False)
    assert [row.parts for row in rows(layout)] == [
        ("model.embed_tokens.weight",), ("model.norm.weight",), ("lm_head.weight",),
    ]  # fmt: skip


def test_there_and_back() -> None:
    layout = layout_of(configuration_of("qwen2"))
    sizes = {"q_proj": 64, "k_proj": 32, "v_proj": 32}
    given = {
        part: torch.randn(next((size for name, size in sizes.items() if name in part), 96))
        for row in rows(layout)
        for part in row.parts
    }
    ours = dict(to_megatron(layout, given.__getitem__))
    assert torch.equal(
        ours["decoder.layers.0.mlp.linear_fc1.weight"][:96], given["model.layers.0.mlp.gate_proj.weight"]
    )
    back = to_hugging_face(layout, ours)
    assert back.keys() == given.keys()
    assert all(torch.equal(back[name], given[name]) for name in given)
