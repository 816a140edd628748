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
    assert len({row.name for row in table}) == len(table)
    assert len(set(parts)) == len(parts)
    assert all(part.startswith(("model.", "lm_head.")) for part in parts)
    assert ("lm_head.weight" in parts) == (not MODELS[kind]["tie_word_embeddings"])


def test_names_of_experts() -> None:
    names = {kind: {row.name: row.parts for row in rows(layout_of(configuration_of(kind)))} for kind in MODELS}
    fc1 = "decoder.layers.1.mlp.experts.local_experts.3.linear_fc1.weight"
    theirs = "model.layers.1.block_sparse_moe.experts.3."
    assert names["mixtral"][fc1] == (f"{theirs}w1.weight", f"{theirs}w3.weight")
    assert names["qwen3_moe"]["decoder.layers.0.mlp.router.weight"] == ("model.layers.0.mlp.gate.weight",)


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
