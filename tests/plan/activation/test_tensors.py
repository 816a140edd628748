from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bytescale_ext.plan.activation.operators import LayerOperators
from bytescale_ext.plan.activation.tensors import layer_tensors
from bytescale_ext.plan.cost.model_shape import LatentShape, ModelShape
from tests.plan.activation.random_loads import LLAMA2_7B

KIB = 1024


def test_bytes_of_a_llama_layer() -> None:
    sizes = {tensor.name: tensor.bytes_per_token / KIB for tensor in layer_tensors(LLAMA2_7B)}
    assert sizes["layer input"] == 8
    assert sizes["query, key, value"] == 24
    assert sizes["attention output"] == 8
    assert sizes["attention log-sum-exp"] == 0.125
    assert sizes["MLP first output"] == 43
    assert sizes["activation output"] == 21.5
    assert sum(sizes.values()) == pytest.approx(128.6, abs=0.05)


def test_plain_gpt_has_memos_sixteen_hidden_sizes() -> None:
    shape = ModelShape(32, 4096, 32, 32, 128, 4 * 4096, False, 50257)  # MEMO section 3.2: 16 b s h elements
    rows = [tensor for tensor in layer_tensors(shape) if "log-sum" not in tensor.name]
    assert sum(tensor.bytes_per_token for tensor in rows) == 16 * 4096 * 2


def test_tensor_parallel_ranks_share_what_they_share() -> None:
    whole, split = layer_tensors(LLAMA2_7B), layer_tensors(LLAMA2_7B, tensor_parallel=4)
    both = layer_tensors(LLAMA2_7B, tensor_parallel=4, sequence_parallel=True)
    for one, four, sequence in zip(whole, split, both, strict=True):
        assert sequence.bytes_per_token == one.bytes_per_token / 4
        is_residual = one.name.endswith("norm output") or one.name in ("layer input", "residual after attention")
        assert four.bytes_per_token == one.bytes_per_token / (1 if is_residual else 4)


def sizes_of(shape: ModelShape, kind: str = "", **settings: Any) -> dict[str, float]:
    """Return the bytes of a token in the tensors of a kind, or in all tensors, by name."""
    tensors = layer_tensors(shape, **settings)
    return {tensor.name: tensor.bytes_per_token for tensor in tensors if kind in ("", tensor.kind)}


@pytest.mark.parametrize("has_norms", [False, True])
def test_a_layer_of_latents_keeps_no_keys_and_values(has_norms: bool) -> None:
    """Queries have 32 heads of 192.

    Latents have 576 numbers instead of keys and values, which have heads of 192 and 128.
    """
    latent = LatentShape(query_rank=100, key_rank=512, position_dim=64, value_dim=128, has_norms=has_norms)
    shape = replace(LLAMA2_7B, num_kv_heads=32, head_dim=192, latent=latent)
    sizes = sizes_of(shape)
    assert sizes["query"] == 2 * 32 * 192
    assert sizes["key, value"] == 2 * 576
    assert sizes["latent vectors"] == 2 * (100 + 576)
    assert sizes.get("normed latent vectors", 0) == 2 * 100 * has_norms
    assert sizes["attention output"] == 2 * 32 * 128
    expanded = replace(shape, latent=replace(latent, is_plain=False))
    sizes = sizes_of(expanded, "cheap")
    assert sizes["key, value"] == 2 * 32 * (192 + 128)
    assert sizes.get("normed latent vectors", 0) == 2 * (100 + 512) * has_norms
    assert "key, value" not in sizes_of(shape, sliced=True)


@pytest.mark.parametrize("query_rank", [0, 100])
def test_tensors_of_latents_in_transformer_engine(query_rank: int) -> None:
    """Two tensor-parallel ranks share the tokens of norms and latents. Queries without a latent are normed, too."""
    latent = LatentShape(query_rank, key_rank=512, position_dim=64, value_dim=128, has_norms=True, is_plain=False)
    shape = replace(LLAMA2_7B, num_kv_heads=32, head_dim=192, latent=latent)
    settings = {"tensor_parallel": 2, "sequence_parallel": True, "operators": LayerOperators(joined_norms=True)}
    cheap, inputs = sizes_of(shape, "cheap", **settings), sizes_of(shape, "input", **settings)
    assert cheap["input norm output"] == 4096
    assert cheap["normed key latent"] == 512
    assert cheap["key, value"] == 32 * (192 + 128)
    assert inputs["normed query latent"] == (query_rank or 4096)
    assert inputs["MLP norm output"] == 4096
    matrix = sizes_of(shape, "matrix", **settings)
    assert matrix["latent vectors"] == query_rank + 512
    assert matrix["query"] == 32 * 192
    without = replace(shape, latent=replace(latent, has_norms=False))
    assert not {"normed query latent", "normed key latent"} & sizes_of(without, **settings).keys()
