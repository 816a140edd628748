from __future__ import annotations

from dataclasses import replace

import pytest

from bytescale_ext.plan.cost.model_shape import LatentShape, ModelShape
from bytescale_ext.plan.memory.model_states import (
    expert_parameters,
    largest_matrix,
    num_parameters,
    stage_parameters,
    state_bytes,
)

LLAMA2_7B = ModelShape(32, 4096, 32, 32, 128, 11008, True, 32000)


def test_llama_has_its_parameters() -> None:
    assert num_parameters(LLAMA2_7B) == 6_738_415_616


def test_ranks_share_out_the_experts_of_each_layer() -> None:
    sparse = replace(
        LLAMA2_7B, num_expert_layers=8, expert_ffn_hidden=1024 + 24, num_experts=16, experts_per_token=2,
        shared_ffn_hidden=24,
    )  # fmt: skip
    assert expert_parameters(sparse) == 8 * 16 * 3 * 4096 * 512
    assert expert_parameters(sparse, tensor_parallel=2, expert_parallel=4) == expert_parameters(sparse) / 8
    assert expert_parameters(sparse.part(16)) == expert_parameters(sparse) / 2
    assert expert_parameters(LLAMA2_7B) == 0
    latent = replace(sparse, expert_latent=1000)
    assert expert_parameters(latent, 2, 4) == 8 * 16 * 3 * 1000 * 512 / 8
    projections = 8 * 2 * 1000 * 4096  # on each tensor-parallel rank
    assert num_parameters(latent, 2) - num_parameters(sparse, 2) == projections
    later = replace(latent, later_layers=1, later_experts=True)
    routers = 9 * 16 * 4096
    assert (
        stage_parameters(later, 2, True, True)
        == stage_parameters(replace(later, num_experts=0, expert_latent=0), 2, True, True)
        + routers
        + projections * 9 / 8
    )


@pytest.mark.parametrize(("element_bytes", "ranks", "each"), [(2, 1, 18.0), (2, 4, 9.0), (4, 1, 16.0), (4, 8, 9.0)])
def test_bytes_of_a_parameter(element_bytes: int, ranks: int, each: float) -> None:
    assert state_bytes(LLAMA2_7B, element_bytes, 1, ranks) == each * 6_738_415_616


def test_the_largest_matrix_of_a_layer_with_latents() -> None:
    routed = {"expert_ffn_hidden": 2 * 9, "num_experts": 4, "experts_per_token": 2}
    shape = ModelShape(1, 8, 2, 2, 4, 10, True, 20, 1, **routed, expert_latent=6)
    assert largest_matrix(shape) == 6 * 2 * 9
    assert largest_matrix(replace(shape, expert_ffn_hidden=2)) == 8 * 8
    assert largest_matrix(replace(shape, expert_ffn_hidden=2, expert_latent=9)) == 8 * 9


def test_latent_attention_and_later_layers_have_their_parameters() -> None:
    # DeepSeek-V2-Lite's attention: 16 heads of 128 + 64, latents of 512 + 64 numbers, values of 128
    latent = LatentShape(query_rank=0, key_rank=512, position_dim=64, value_dim=128, has_norms=True)
    shape = ModelShape(2, 2048, 16, 16, 192, 10944, True, 102400, latent=latent)
    attention = 2048 * 16 * 192 + 2048 * 576 + 512 + 512 * 16 * 256 + 16 * 128 * 2048
    layer = attention + 3 * 2048 * 10944 + 2 * 2048
    assert num_parameters(shape) == 2 * layer + 2 * 102400 * 2048 + 2048
    deeper = replace(LLAMA2_7B, later_layers=1)
    layer = 4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096
    assert num_parameters(deeper) - num_parameters(LLAMA2_7B) == layer + 2 * 4096**2 + 3 * 4096
    last = stage_parameters(deeper, 1, has_embedding=False, has_head=True)
    assert last == num_parameters(deeper), "the last stage has an embedding for later tokens"
    first = stage_parameters(deeper, 1, has_embedding=True, has_head=False)
    assert first == stage_parameters(LLAMA2_7B, 1, has_embedding=True, has_head=False)
    # A further layer like DeepSeek-V3's: shared experts and a router, and experts on the stage of the layer.
    routed = {"expert_ffn_hidden": 2 * 4 + 6, "num_experts": 16, "experts_per_token": 2, "shared_ffn_hidden": 6}
    sparse = replace(LLAMA2_7B, num_expert_layers=8, **routed)
    later = replace(sparse, later_layers=1, later_experts=True)
    layer = 4 * 4096**2 + 3 * 4096 * 6 + 16 * 4096 + 2 * 4096
    assert num_parameters(later) - num_parameters(sparse) == layer + 2 * 4096**2 + 3 * 4096
    assert expert_parameters(later) == expert_parameters(sparse) * 9 / 8
    first, last = later.stages((16, 16))
    assert expert_parameters(first) == expert_parameters(sparse) / 2
    assert expert_parameters(last) == expert_parameters(sparse) * 5 / 8
