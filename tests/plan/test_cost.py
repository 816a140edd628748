from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bytescale_ext.plan.cost import (
    LLAMA_7B,
    CostModel,
    ModelShape,
    SliceShares,
    StageCost,
    attention_flops_per_square,
    flops_cost,
    linear_flops_per_token,
    model_flops,
)
from bytescale_ext.plan.shapes import MicroBatch, Shard

TINY = ModelShape(num_layers=2, hidden=8, num_heads=4, num_kv_heads=2, head_dim=3, ffn_hidden=10, gated=True, vocab=20)


def test_linear_flops_by_hand() -> None:
    # query 8x12, key and value 8x6 each, output 12x8; three MLP matrices 8x10; output layer 8x20
    weights = 2 * (8 * 12 + 2 * 8 * 6 + 12 * 8 + 3 * 8 * 10) + 8 * 20
    assert linear_flops_per_token(TINY) == 2 * weights


def test_an_mlp_without_gate_has_two_matrices() -> None:
    plain = ModelShape(2, 8, 4, 2, 3, 10, False, 20)
    assert linear_flops_per_token(TINY) - linear_flops_per_token(plain) == 2 * 2 * 8 * 10


def test_a_layer_of_experts_counts_those_of_one_token() -> None:
    # in one of the two layers: 2 experts of width 4 for each token and a shared one of 6, chosen from 16
    sparse = replace(TINY, num_expert_layers=1, expert_ffn_hidden=2 * 4 + 6, num_experts=16)
    assert linear_flops_per_token(sparse) - linear_flops_per_token(TINY) == 2 * (3 * 8 * (14 - 10) + 8 * 16)


def test_attention_flops_by_hand() -> None:
    # scores and values: 2 products of 2 s^2 head_dim, 4 heads, 2 layers; half under the mask
    assert attention_flops_per_square(TINY) == 2 * (2 * 2 * 3 * 4) / 2


def test_model_flops_are_three_forwards_of_each_document() -> None:
    one = 3 * (attention_flops_per_square(TINY) * 100 + linear_flops_per_token(TINY) * 10)
    assert model_flops(TINY, [10]) == one
    assert model_flops(TINY, [10, 10]) == 2 * one
    assert model_flops(TINY, [20]) > 2 * one
    assert model_flops(TINY, []) == 0


def test_model_flops_of_7b_are_six_per_parameter_for_short_documents() -> None:
    num_weights = linear_flops_per_token(LLAMA_7B) / 2
    assert num_weights == pytest.approx(5.8e9, rel=0.05)  # 6.7e9 less the embedding and grouped keys and values
    assert model_flops(LLAMA_7B, [1]) == pytest.approx(6 * num_weights, rel=1e-3)


def test_sequence_cost_by_hand() -> None:
    cost = CostModel(a=2.0, b=3.0, c=50.0, g=7.0)
    assert cost.sequence_cost(10, 1) == 2 * 100 + 3 * 10
    assert cost.sequence_cost(10, 2) == max(2 * 100 / 2, 50 * 10 / 2) + 3 * 10 / 2  # the exchange is slower
    assert cost.sequence_cost(100, 2) == 2 * 10_000 / 2 + 3 * 100 / 2  # attention is slower


def test_a_ring_pays_h_for_what_it_receives() -> None:
    free, cost = CostModel(a=2.0, b=3.0, c=50.0, g=7.0), CostModel(a=2.0, b=3.0, c=50.0, g=7.0, h=11.0)
    assert cost.sequence_cost(10, 1) == free.sequence_cost(10, 1)
    for length, width in ((10, 2), (100, 2), (100, 5)):
        received = length * (width - 1) / width
        assert cost.sequence_cost(length, width) == pytest.approx(free.sequence_cost(length, width) + 11 * received)
    shard = Shard(0, ((0, 2), (5, 6)), (0, 1))
    assert cost.shard_cost(shard, 6) == free.shard_cost(shard, 6) + 11 * 6 / 2
    tokens, widths = np.array([10.0, 100.0, 100.0]), np.array([1.0, 2.0, 5.0])
    one_by_one = [cost.sequence_cost(int(n), int(d)) for n, d in zip(tokens, widths, strict=True)]
    np.testing.assert_allclose(cost.sequence_costs(tokens, widths), one_by_one)


def test_each_slice_of_a_ring_pays_h_for_the_keys_that_travel() -> None:
    free, cost = CostModel(a=1e-2, b=3.0, c=0.1), CostModel(a=1e-2, b=3.0, c=0.1, h=0.5)
    tokens, widths = np.array([1000.0, 70.0]), np.array([4.0, 1.0])
    cut = SliceShares.of(cost, tokens, widths, 3)
    (costs, exposed), (without, same) = cost.slice_costs(tokens, widths, cut), free.slice_costs(tokens, widths, cut)
    np.testing.assert_allclose(costs - without, [1000 * 3 / 4 * 0.5 * cut.exchanged[0], [0.0] * 3], atol=1e-9)
    assert (exposed == same).all()


def test_micro_batch_cost_counts_real_tokens_and_g_once() -> None:
    cost = CostModel(a=2.0, b=3.0, c=0.0, g=7.0)
    ring = Shard(1, ((0, 2), (4, 5)), (0, 1))
    local = Shard(0, ((0, 4),), (0,))
    assert cost.shard_cost(ring, 5) == 2 * 25 / 2 + 3 * 3
    assert cost.micro_batch_cost(MicroBatch((ring, local)), (4, 5)) == 7 + (25 + 9) + (2 * 16 + 3 * 4)


def test_members_of_a_ring_together_do_the_work_of_the_sequence() -> None:
    cost = flops_cost(TINY)
    shards = [Shard(0, ((0, 2), (5, 6)), (0, 1)), Shard(0, ((2, 4), (4, 5)), (0, 1))]
    assert sum(cost.shard_cost(shard, 6) for shard in shards) == pytest.approx(model_flops(TINY, [6]))


def test_slices_by_hand() -> None:
    cost = CostModel(a=2.0, b=3.0, c=50.0)
    # (2 P^2 + 3 P) of 12 tokens is 324; half of it is 162 = 2 * 81 + 3 * 0 near P = 8.28
    tokens, widths = np.array([12.0, 12.0]), np.array([2.0, 1.0])
    cut = SliceShares.of(cost, tokens, widths, 2)
    end = 12 * cut.tokens[0, 0]
    assert 2 * end**2 + 3 * end == pytest.approx(162)
    costs, exposed = cost.slice_costs(tokens, widths, cut)
    exchanges = np.array([50 * end / 2, 50 * 12 / 2])  # the second slice needs all keys again
    attention = np.array([end**2, 144 - end**2])
    np.testing.assert_allclose(costs[0], exchanges + 3 / 2 * np.array([end, 12 - end]))
    np.testing.assert_allclose(exposed[0], exchanges - attention)
    np.testing.assert_allclose(costs[1], [162, 162])  # on one rank: equal parts
    assert exposed[1].tolist() == [0, 0]
    kept = SliceShares.of(cost, tokens, widths, 2, kept_tokens=12)
    costs, exposed = cost.slice_costs(tokens, widths, kept)
    # Now its own keys alone travel, for all tokens longer than their attention takes: 50 > 2 * 2 * 12. Equal halves.
    np.testing.assert_allclose(costs[0], [50 * 6 / 2 + 3 * 6 / 2] * 2)
    np.testing.assert_allclose(exposed[0], [150 - 6**2, 150 - (12**2 - 6**2)])
    # Backward their gradients alone travel: what c has beyond the forward's.
    stage = StageCost(cost, replace(cost, c=80.0))
    (forward, _), (backward, _) = stage.slice_costs(tokens, widths, kept)
    assert (forward == costs).all()
    np.testing.assert_allclose(backward, replace(cost, c=30.0).slice_costs(tokens, widths, kept)[0])
    again = stage.slice_costs(tokens, widths, cut)[1][0]
    np.testing.assert_allclose(again, stage.backward.slice_costs(tokens, widths, cut)[0])
    assert SliceShares.of(cost, tokens, widths, 2, kept_tokens=11).exchanged.tolist() == cut.exchanged.tolist()


@pytest.mark.parametrize(
    "cost", [CostModel(2.0, 3.0, 5.0), CostModel(2.0, 0.0, 9.0), CostModel(1.0, 3.0, 900.0)], ids=str
)
@pytest.mark.parametrize("width", [1, 2, 8])
def test_shares_end_where_the_sum_over_tokens_does(cost: CostModel, width: int) -> None:
    """Against a sum over small steps of what each token costs."""
    length, shares = 50.0, np.array([0.1, 0.5, 0.9])
    middles = (np.arange(100_000) + 0.5) * length / 100_000
    costs = np.cumsum(np.maximum(2 * cost.a * middles, cost.c * (width - 1)) + cost.b)
    expected = np.interp(shares * costs[-1], costs, middles)
    found = cost.end_of_share(np.array(length), shares, np.array(float(width)))
    np.testing.assert_allclose(found, expected, atol=1e-3)


def test_slices_cost_the_sequence_where_attention_hides_the_exchange() -> None:
    cost = CostModel(a=1e-2, b=3.0, c=0.1)
    tokens, widths = np.array([1000.0, 70.0, 1.0, 5000.0]), np.array([4.0, 1.0, 1.0, 9.0])
    whole = cost.sequence_costs(tokens, widths)
    for num_slices in (1, 2, 5):
        cut = SliceShares.of(cost, tokens, widths, num_slices)
        costs, exposed = cost.slice_costs(tokens, widths, cut)
        np.testing.assert_allclose(costs, np.repeat(whole[:, None] / num_slices, num_slices, axis=1))
        assert not exposed.any()
    assert SliceShares.of(CostModel(0.0, 0.0), tokens, widths, 1).exchanged.tolist() == [[1.0]] * 4


def test_scaled_scales_everything() -> None:
    assert CostModel(1.0, 2.0, 3.0, 4.0, 5.0).scaled(2.0) == CostModel(2.0, 4.0, 6.0, 8.0, 10.0)
    assert CostModel(1.0, 2.0, 3.0, 4.0, 5.0) + CostModel(5.0, 4.0, 3.0, 2.0, 2.0) == CostModel(6.0, 6.0, 6.0, 6.0, 7.0)
