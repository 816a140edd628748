"""Costs of slices by hand, and as parts of whole sequences."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bytescale_ext.plan.cost.cost_model import CostModel, StageCost
from bytescale_ext.plan.cost.slice_shares import SliceShares
from bytescale_ext.plan.step.sizes import Slicing


def test_each_slice_of_a_ring_pays_h_for_the_keys_that_travel() -> None:
    free, cost = CostModel(a=1e-2, b=3.0, c=0.1), CostModel(a=1e-2, b=3.0, c=0.1, h=0.5)
    tokens, widths = np.array([1000.0, 70.0]), np.array([4.0, 1.0])
    cut = SliceShares.of(cost, tokens, widths, Slicing(3))
    (costs, exposed), (without, same) = cut.costs(cost), cut.costs(free)
    np.testing.assert_allclose(costs - without, [1000 * 3 / 4 * 0.5 * cut.exchanged[0], [0.0] * 3], atol=1e-9)
    assert (exposed == same).all()


def test_each_slice_of_a_ring_pays_m_for_each_block() -> None:
    tokens, widths = np.array([1000.0, 70.0]), np.array([4.0, 1.0])
    for window_share, blocks in ((0.0, 3.0), (1.0, 2.0)):
        free = CostModel(a=1e-2, b=3.0, c=0.1, window=8, window_share=window_share)
        cost = replace(free, m=0.5)
        cut = SliceShares.of(cost, tokens, widths, Slicing(3))
        (costs, exposed), (without, same) = cut.costs(cost), cut.costs(free)
        np.testing.assert_allclose(costs - without, [[0.5 * blocks] * 3, [0.0] * 3], atol=1e-9)
        assert (exposed == same).all()


def test_slices_by_hand() -> None:
    cost = CostModel(a=2.0, b=3.0, c=50.0)
    # (2 P^2 + 3 P) of 12 tokens is 324; half of it is 162 = 2 * 81 + 3 * 0 near P = 8.28
    tokens, widths = np.array([12.0, 12.0]), np.array([2.0, 1.0])
    cut = SliceShares.of(cost, tokens, widths, Slicing(2))
    end = 12 * cut.tokens[0, 0]
    assert 2 * end**2 + 3 * end == pytest.approx(162)
    costs, exposed = cut.costs(cost)
    exchanges = np.array([50 * end / 2, 50 * 12 / 2])  # the second slice needs all keys again
    attention = np.array([end**2, 144 - end**2])
    np.testing.assert_allclose(costs[0], exchanges + 3 / 2 * np.array([end, 12 - end]))
    np.testing.assert_allclose(exposed[0], exchanges - attention)
    np.testing.assert_allclose(costs[1], [162, 162])  # on one rank: equal parts
    assert exposed[1].tolist() == [0, 0]
    kept = SliceShares.of(cost, tokens, widths, Slicing(2, kept_tokens=12))
    costs, exposed = kept.costs(cost)
    # Only own keys travel, which takes longer than attention for all tokens (50 > 2 * 2 * 12), so halves are equal.
    np.testing.assert_allclose(costs[0], [50 * 6 / 2 + 3 * 6 / 2] * 2)
    np.testing.assert_allclose(exposed[0], [150 - 6**2, 150 - (12**2 - 6**2)])
    # Backward only their gradients travel: the difference of the backward and the forward c.
    stage = StageCost(cost, replace(cost, c=80.0))
    (forward, _), (backward, _) = kept.stage_costs(stage)
    assert (forward == costs).all()
    np.testing.assert_allclose(backward, kept.costs(replace(cost, c=30.0))[0])
    # Without sums the gradients of all keys up to the slice's end travel.
    sent = SliceShares.of(cost, tokens, widths, Slicing(2, kept_tokens=12, summed_tokens=11))
    (forward, _), (backward, exposed) = sent.stage_costs(stage)
    assert (forward == costs).all()
    np.testing.assert_allclose(exposed[0], [30 * 6 / 2 - 6**2, 30 * 12 / 2 - (12**2 - 6**2)])
    again = cut.stage_costs(stage)[1][0]
    np.testing.assert_allclose(again, cut.costs(stage.backward)[0])
    assert SliceShares.of(cost, tokens, widths, Slicing(2, kept_tokens=11)).exchanged.tolist() == cut.exchanged.tolist()


@pytest.mark.parametrize("kept", [0, 12])
def test_slices_expand_the_latents_of_all_earlier_ones_again(kept: int) -> None:
    """With 12 tokens on 2 ranks, the second half expands all but its own 3 tokens, and the other's first 3 twice."""
    cost = CostModel(a=0.0, b=4.0, e=10.0)
    tokens, widths = np.array([12.0, 12.0]), np.array([2.0, 1.0])
    cut = SliceShares.of(cost, tokens, widths, Slicing(2, kept))
    costs, exposed = cut.costs(cost)
    assert costs.tolist() == [[12 + 10 * 3, 12 + 10 * (9 + 3)], [24, 24]]  # on one rank: within a slice
    assert not exposed.any()
    whole = SliceShares.of(cost, tokens, widths, Slicing(1)).costs(cost)[0]
    assert whole.tolist() == [[cost.sequence_cost(12.0, 2.0)], [cost.sequence_cost(12.0, 1.0)]] == [[84], [48]]
    limited = replace(cost, window=4, window_share=1.0)
    costs, _ = SliceShares.of(limited, tokens, widths, Slicing(1)).costs(limited)
    assert costs[0].tolist() == pytest.approx([limited.sequence_cost(12.0, 2.0)])


def test_copies_of_swapped_keys_hide_behind_all_work_of_their_slice() -> None:
    """For 12 tokens on 2 ranks in equal halves, forward reads or writes 6 tokens, and backward reads 6, then 12."""
    cost = CostModel(a=0.0, b=4.0)  # a slice takes 4 * 6 / 2 = 12
    tokens, widths = np.array([12.0, 12.0, 10.0]), np.array([2.0, 1.0, 2.0])
    cut = SliceShares.of(cost, tokens, widths, Slicing(2, kept_tokens=10, swapped_tokens=12))
    assert cut.swapped.tolist() == [True, False, False]
    assert cut.kept.tolist() == [True] * 3
    (forward, exposed), (backward, more) = cut.stage_costs(StageCost(cost, cost.scaled(2.0), key_read=2.0))
    assert forward.tolist() == [[12, 12], [24, 24], [10, 10]]  # 2 * 6 overlaps
    assert backward.tolist() == [[24, 24], [48, 48], [20, 20]]
    assert not exposed.any()
    assert not more.any()
    (forward, exposed), (backward, more) = cut.stage_costs(StageCost(cost, cost.scaled(2.0), key_read=5.0))
    assert forward[0].tolist() == [30, 30]
    assert exposed[0].tolist() == [18, 18]
    assert backward[0].tolist() == [30, 60]
    assert more[0].tolist() == [6, 36]
    assert (forward[1:].tolist(), backward[1:].tolist()) == ([[24, 24], [10, 10]], [[48, 48], [20, 20]])


def test_slices_cost_the_sequence_where_attention_hides_the_exchange() -> None:
    cost = CostModel(a=1e-2, b=3.0, c=0.1)
    tokens, widths = np.array([1000.0, 70.0, 1.0, 5000.0]), np.array([4.0, 1.0, 1.0, 9.0])
    whole = cost.sequence_cost(tokens, widths)
    for num_slices in (1, 2, 5):
        cut = SliceShares.of(cost, tokens, widths, Slicing(num_slices))
        costs, exposed = cut.costs(cost)
        np.testing.assert_allclose(costs, np.repeat(whole[:, None] / num_slices, num_slices, axis=1))
        assert not exposed.any()
    assert SliceShares.of(CostModel(0.0, 0.0), tokens, widths, Slicing(1)).exchanged.tolist() == [[1.0]] * 4


def test_slices_with_windows_cost_the_sequence_and_what_they_fetch_again() -> None:
    """Attention and linear work sum to the whole. Each slice fetches the windows before its own parts."""
    cost = CostModel(a=2.0, b=3.0, c=0.5, h=0.25, window=8, window_share=0.75)
    lengths, widths = np.array([400.0, 400.0, 6.0]), np.array([4.0, 1.0, 2.0])
    for kept in (0, 1000):
        shares = SliceShares.of(cost, lengths, widths, Slicing(4, kept))
        np.testing.assert_allclose(shares.squares.sum(axis=1), 1.0)
        free = replace(cost, c=0.0, h=0.0)
        costs, exposed = shares.costs(free)
        np.testing.assert_allclose(costs.sum(axis=1), free.sequence_cost(lengths, widths))
        assert not exposed.any()
        costs, exposed = shares.costs(cost)
        # The exchange of full layers overlaps in the first sequence; 3 windows of 16 tokens and one of the first slice
        # do not.
        assert exposed[0].tolist() == [0.75 * 0.5 * 16.0] * 4
        assert not exposed[1].any()
        assert (costs.sum(axis=1) >= cost.sequence_cost(lengths, widths) - 1e-9).all()
