from __future__ import annotations

from dataclasses import replace

import pytest

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


@pytest.mark.parametrize("has_norms", [False, True])
def test_a_layer_of_latents_keeps_no_keys_and_values(has_norms: bool) -> None:
    """Queries have 32 heads of 192.

    Latents have 576 numbers instead of keys and values, which have heads of 192 and 128.
    """
    latent = LatentShape(query_rank=100, key_rank=512, position_dim=64, value_dim=128, has_norms=has_norms)
    shape = replace(LLAMA2_7B, num_kv_heads=32, head_dim=192, latent=latent)
    sizes = {tensor.name: tensor.bytes_per_token for tensor in layer_tensors(shape)}
    assert sizes["query, key, value"] == 2 * (32 * 192 + 576)
    assert sizes["latent vectors"] == 2 * (100 + 576)
    assert sizes.get("normed latent vectors", 0) == 2 * 100 * has_norms
    assert sizes["attention output"] == 2 * 32 * 128
    expanded = replace(shape, latent=replace(latent, is_plain=False))
    sizes = {tensor.name: tensor.bytes_per_token for tensor in layer_tensors(expanded)}
    assert sizes["query, key, value"] == 2 * 32 * (2 * 192 + 128)
    assert sizes.get("normed latent vectors", 0) == 2 * (100 + 512) * has_norms
    in_slices = {tensor.name: tensor.bytes_per_token for tensor in layer_tensors(shape, sliced=True)}
    assert in_slices["key, value"] == 2 * 576
