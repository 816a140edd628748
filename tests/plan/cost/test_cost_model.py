"""Costs of sequences, shards and micro-batches by hand."""

from __future__ import annotations

import numpy as np
import pytest

from bytescale_ext.plan.cost.cost_model import CostModel
from bytescale_ext.plan.step.micro_batch import MicroBatch, Shard


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
    np.testing.assert_allclose(cost.sequence_cost(tokens, widths), one_by_one)


def test_micro_batch_cost_counts_real_tokens_and_g_once() -> None:
    cost = CostModel(a=2.0, b=3.0, c=0.0, g=7.0)
    ring = Shard(1, ((0, 2), (4, 5)), (0, 1))
    local = Shard(0, ((0, 4),), (0,))
    assert cost.shard_cost(ring, 5) == 2 * 25 / 2 + 3 * 3
    assert cost.micro_batch_cost(MicroBatch((ring, local)), (4, 5)) == 7 + (25 + 9) + (2 * 16 + 3 * 4)


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


def test_scaled_scales_everything() -> None:
    assert CostModel(1.0, 2.0, 3.0, 4.0, 5.0).scaled(2.0) == CostModel(2.0, 4.0, 6.0, 8.0, 10.0)
    assert CostModel(1.0, 2.0, 3.0, 4.0, 5.0) + CostModel(5.0, 4.0, 3.0, 2.0, 2.0) == CostModel(6.0, 6.0, 6.0, 6.0, 7.0)
