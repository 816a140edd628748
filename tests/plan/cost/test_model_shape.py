"""FLOPs of a model by hand."""

from __future__ import annotations

from dataclasses import replace

from bytescale_ext.plan.cost.model_shape import (
    LatentShape,
    ModelShape,
    attention_flops_per_square,
    has_latents,
    key_value_bytes,
    key_value_numbers,
    later_layer_weights,
    layer_flops_per_token,
    linear_flops_per_token,
)

TINY = ModelShape(num_layers=2, hidden=8, num_heads=4, num_kv_heads=2, head_dim=3, ffn_hidden=10, gated=True, vocab=20)


def test_linear_flops_by_hand() -> None:
    # query 8x12, key and value 8x6 each, output 12x8; three MLP matrices 8x10; output layer 8x20
    weights = 2 * (8 * 12 + 2 * 8 * 6 + 12 * 8 + 3 * 8 * 10) + 8 * 20
    assert linear_flops_per_token(TINY) == 2 * weights


def test_an_mlp_without_gate_has_two_matrices() -> None:
    plain = ModelShape(2, 8, 4, 2, 3, 10, False, 20)
    assert linear_flops_per_token(TINY) - linear_flops_per_token(plain) == 2 * 2 * 8 * 10


def test_a_layer_of_experts_counts_those_of_one_token() -> None:
    # in one of two layers: each token has 2 of 16 experts of width 4, and a shared expert of width 6
    sparse = replace(TINY, num_expert_layers=1, expert_ffn_hidden=2 * 4 + 6, num_experts=16)
    assert linear_flops_per_token(sparse) - linear_flops_per_token(TINY) == 2 * (3 * 8 * (14 - 10) + 8 * 16)


def test_experts_of_latents_are_between_two_projections() -> None:
    # in one of two layers, and in a layer of multi-token prediction: latents of 5 numbers
    routed = {"expert_ffn_hidden": 2 * 4 + 6, "num_experts": 16, "experts_per_token": 2, "shared_ffn_hidden": 6}
    sparse = replace(TINY, num_expert_layers=1, later_layers=1, later_experts=True, **routed)
    latent = replace(sparse, expert_latent=5)
    assert (sparse.token_width, latent.token_width) == (8, 5)
    more = 2 * 8 * 5 - 3 * (8 - 5) * 2 * 4
    assert linear_flops_per_token(latent) - linear_flops_per_token(sparse) == 2 * 2 * more
    assert later_layer_weights(latent) - later_layer_weights(sparse) == more
    dense = latent.with_experts_per_token(16)
    assert linear_flops_per_token(dense) - linear_flops_per_token(latent) == 2 * 2 * 3 * 5 * 14 * 4


def test_attention_flops_by_hand() -> None:
    # scores and values: 2 products of 2 s^2 head_dim, 4 heads, 2 layers; half under the mask
    assert attention_flops_per_square(TINY) == 2 * (2 * 2 * 3 * 4) / 2


def test_flops_of_the_experts_that_ran() -> None:
    routed = {"expert_ffn_hidden": 2 * 4 + 6, "num_experts": 16, "experts_per_token": 2, "shared_ffn_hidden": 6}
    sparse = replace(TINY, num_expert_layers=1, **routed)
    assert sparse.with_experts_per_token(2) == sparse
    dense = sparse.with_experts_per_token(16)
    assert linear_flops_per_token(dense) - linear_flops_per_token(sparse) == 2 * 3 * 8 * 14 * 4
    assert sparse.with_experts_per_token(4.5).expert_ffn_hidden == 4.5 * 4 + 6


def test_layers_of_multi_token_prediction_count_with_their_output_layer() -> None:
    deeper = replace(TINY, later_layers=2)
    # a projection of two hidden states to one, a layer, and a second output layer
    weights = 8 * 16 + (8 * 12 + 2 * 8 * 6 + 12 * 8 + 3 * 8 * 10) + 8 * 20
    assert later_layer_weights(TINY) == weights - 8 * 20
    assert linear_flops_per_token(deeper) - linear_flops_per_token(TINY) == 2 * 2 * weights
    assert attention_flops_per_square(deeper) == 2 * attention_flops_per_square(TINY)
    assert deeper.part(1) == TINY.part(1), "a part of the layers is without them"
    first, last = deeper.stages((1, 1))
    assert (first, last.later_layers) == (TINY.part(1), 2)
    assert layer_flops_per_token(deeper) == layer_flops_per_token(TINY) == linear_flops_per_token(TINY) / 2 - 8 * 20


def test_projections_of_latent_attention_by_hand() -> None:
    # keys and values of 4 heads from 7 numbers and 2 with a position; a key has 3 = 1 + 2 numbers, a value 5
    one = LatentShape(query_rank=6, key_rank=7, position_dim=2, value_dim=5, has_norms=True)
    latent = replace(TINY, num_kv_heads=4, latent=one)
    weights = 8 * 6 + 6 * 4 * 3 + 8 * (7 + 2) + 7 * 4 * (1 + 5) + 4 * 5 * 8
    assert latent.projection_weights == weights
    direct = replace(latent, latent=replace(one, query_rank=0))
    assert direct.projection_weights == weights - 8 * 6 - 6 * 4 * 3 + 8 * 4 * 3
    assert attention_flops_per_square(latent) == 2 * 4 * (3 + 5)
    assert (TINY.value_dim, latent.value_dim, one.latent_numbers, one.norm_weights) == (3, 5, 9, 13)


def test_later_layers_with_experts_have_those_of_one_token() -> None:
    routed = {"expert_ffn_hidden": 2 * 4 + 6, "num_experts": 16, "experts_per_token": 2, "shared_ffn_hidden": 6}
    sparse = replace(TINY, num_expert_layers=1, later_layers=1, later_experts=True, **routed)
    # a dense MLP of 3 x 8 x 10, or a router of 16 experts, two experts of a token and the shared experts
    assert later_layer_weights(sparse) - later_layer_weights(TINY) == 3 * 8 * (14 - 10) + 8 * 16
    assert later_layer_weights(replace(sparse, later_experts=False)) == later_layer_weights(TINY)


# DeepSeek-V2-Lite's attention (arXiv:2405.04434, appendix B): 16 heads of 128 + 64, latents of 512 + 64 numbers.
LITE = LatentShape(query_rank=0, key_rank=512, position_dim=64, value_dim=128)


def test_a_ring_has_latents_where_sending_keys_takes_longer_than_expanding_them() -> None:
    shape = replace(TINY, num_heads=16, num_kv_heads=16, head_dim=192, latent=LITE)
    assert has_latents(shape)
    assert (key_value_bytes(shape), key_value_bytes(shape, 8)) == (
        2 * 576,
        2 * 576,
    )  # instead of 16 x (192 + 128) numbers
    assert key_value_bytes(shape, 16) == 2 * (192 + 128)  # one head has fewer numbers than the latent
    assert not has_latents(shape, 16)
    assert key_value_bytes(shape, 1, 4) == 2 * key_value_bytes(shape)
    engine = replace(shape, latent=replace(LITE, is_plain=False))
    assert (has_latents(engine), key_value_bytes(engine)) == (False, 2 * 16 * (192 + 128))
    # saving 300 numbers is worth 2 x 300 x 8,000 FLOPs, more than the product; saving 10 or none is not
    narrow = LatentShape(0, 300, 0, 100)
    assert [replace(narrow, key_rank=rank).travels(3, 100) for rank in (300, 590, 600)] == [True, False, False]


def test_numbers_of_keys_and_values() -> None:
    assert [replace(LITE, position_dim=dim).ring_numbers for dim in (63, 64)] == [576, 576]  # two equal halves
    assert (has_latents(TINY), key_value_numbers(TINY), key_value_numbers(TINY, 4)) == (False, 2 * 2 * 3, 3)
    wide = replace(TINY, latent=LatentShape(0, 50, 0, 5, is_plain=False))  # keys of 3 numbers are not padded
    assert key_value_numbers(wide) == 2 * (3 + 5)
