"""Costs of sequences, shards and micro-batches by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bytescale_ext.plan.cost.cost_model import CostModel, StageCost
from bytescale_ext.plan.step.micro_batch import MicroBatch, Shard


def test_sequence_cost_by_hand() -> None:
    cost = CostModel(a=2.0, b=3.0, c=50.0, g=7.0)
    assert cost.sequence_cost(10, 1) == 2 * 100 + 3 * 10
    assert cost.sequence_cost(10, 2) == max(2 * 100 / 2, 50 * 10 / 2) + 3 * 10 / 2  # the exchange is slower
    assert cost.sequence_cost(100, 2) == 2 * 10_000 / 2 + 3 * 100 / 2  # attention is slower


def test_a_ring_pays_h_for_what_it_receives() -> None:
    free, cost = CostModel(a=2.0, b=3.0, c=5.0, g=7.0), CostModel(a=2.0, b=3.0, c=5.0, g=7.0, h=11.0)
    assert cost.sequence_cost(10, 1) == free.sequence_cost(10, 1)
    for length, width in ((10, 2), (100, 2), (100, 5)):
        received = length * (width - 1) / width
        assert cost.sequence_cost(length, width) == pytest.approx(free.sequence_cost(length, width) + 11 * received)
    shard = Shard(0, ((0, 2), (5, 6)), (0, 1))
    assert cost.shard_cost(shard, 6) == free.shard_cost(shard, 6) + 11 * 6 / 2
    tokens, widths = np.array([10.0, 100.0, 100.0]), np.array([1.0, 2.0, 5.0])
    one_by_one = [cost.sequence_cost(int(n), int(d)) for n, d in zip(tokens, widths, strict=True)]
    np.testing.assert_allclose(cost.sequence_cost(tokens, widths), one_by_one)


def test_exchange_hides_behind_all_that_a_ring_computes() -> None:
    cost = CostModel(a=2.0, b=3.0, c=50.0, h=1.0, m=4.0)
    attention, joined, exchange = 2 * 100 / 2, 10 / 2 + 4, 50 * 10 / 2
    assert cost.attention_cost(10, 2) == exchange > attention + joined
    faster = replace(cost, c=21.0)
    assert faster.attention_cost(10, 2) == attention + joined > 21 * 10 / 2 > attention
    exposed = cost.exposed_exchange(np.array([10.0]), np.array([2.0]), np.array([1.0]))
    assert exposed.tolist() == [exchange - attention - joined]


def test_a_ring_pays_m_for_each_block_however_short() -> None:
    free, cost = CostModel(a=2.0, b=3.0, c=5.0, h=1.0), CostModel(a=2.0, b=3.0, c=5.0, h=1.0, m=7.0)
    lengths, widths = np.array([10.0, 1000.0, 10.0]), np.array([4.0, 4.0, 1.0])
    np.testing.assert_allclose(
        cost.sequence_cost(lengths, widths) - free.sequence_cost(lengths, widths), [21.0, 21.0, 0.0]
    )
    both = cost.scaled(2.0) + cost
    assert both.sequence_cost(10.0, 4.0) == pytest.approx(3 * cost.sequence_cost(10.0, 4.0))
    only = replace(cost, window=8, window_share=1.0)  # blocks before the two parts of a rank
    assert only.sequence_cost(1000.0, 8.0) - replace(only, m=0.0).sequence_cost(1000.0, 8.0) == pytest.approx(14.0)


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
    """The end of a share equals the end from a sum of token costs in small steps."""
    length, shares = 50.0, np.array([0.1, 0.5, 0.9])
    middles = (np.arange(100_000) + 0.5) * length / 100_000
    costs = np.cumsum(np.maximum(2 * cost.a * middles, cost.c * (width - 1)) + cost.b)
    expected = np.interp(shares * costs[-1], costs, middles)
    found = cost.end_of_share(np.array(length), shares, np.array(float(width)))
    np.testing.assert_allclose(found, expected, atol=1e-3)


def test_scaled_scales_everything() -> None:
    assert CostModel(1.0, 2.0, 3.0, 4.0, 5.0).scaled(2.0) == CostModel(2.0, 4.0, 6.0, 8.0, 10.0)
    assert CostModel(1.0, 2.0, 3.0, 4.0, 5.0) + CostModel(5.0, 4.0, 3.0, 2.0, 2.0) == CostModel(6.0, 6.0, 6.0, 6.0, 7.0)


WINDOWED = CostModel(a=2.0, b=3.0, c=0.5, g=1.0, h=0.25, window=8, window_share=0.75)


def test_padding_is_linear_work_of_each_micro_batch() -> None:
    stage = StageCost(CostModel(a=2.0, b=3.0, g=7.0), CostModel(a=4.0, b=5.0, g=11.0))
    padded = stage.with_padding(7.5)
    assert (padded.forward.g, padded.backward.g) == (7 + 3 * 7.5, 11 + 5 * 7.5)
    assert padded.both.sequence_cost(10, 2) == stage.both.sequence_cost(10, 2)
    assert stage.with_padding(0) == stage


def test_expanded_latents_cost_a_ring_as_received_keys_do() -> None:
    lengths, widths = np.array([5.0, 9.0, 20.0, 500.0]), np.array([1.0, 3.0, 4.0, 2.0])
    for base in (replace(WINDOWED, h=0.0), CostModel(a=2.0, b=3.0, c=0.5)):
        expanding, joining = replace(base, e=0.25), replace(base, h=0.25)
        assert expanding.sequence_cost(lengths, widths).tolist() == joining.sequence_cost(lengths, widths).tolist()
        assert expanding.sequence_cost(20.0, 1.0) == base.sequence_cost(20.0, 1.0)
        assert [one.e for one in (expanding.scaled(2.0), expanding + expanding, expanding.floor())] == [0.5, 0.5, 0.25]


def test_windows_make_work_linear() -> None:
    """A quarter of the layers see every key. In the others all tokens beyond the window cost the same."""
    full = replace(WINDOWED, window_share=0.0)
    assert WINDOWED.squares(8.0) == full.squares(8.0) == 64.0
    assert WINDOWED.squares(20.0) == 0.25 * 400 + 0.75 * (2 * 8 * 20 - 64)
    only = replace(WINDOWED, window_share=1.0)
    assert only.squares(101.0) - only.squares(100.0) == only.squares(21.0) - only.squares(20.0) == 16.0
    lengths = np.array([1.0, 8.0, 20.0, 300.0])
    assert only.squares(lengths).tolist() == [only.squares(length) for length in lengths.tolist()]
    # Pairs of a query and a key in the window, each counted twice, as in s^2.
    band = sum(min(token, 8) for token in range(1000))
    assert 2 * band == pytest.approx(only.squares(1000.0), rel=0.01)


def test_a_ring_fetches_the_window_before_each_part() -> None:
    """On 4 ranks, layers with a window receive 15 of the 20 tokens, fewer than two windows, without overlap."""
    full = replace(WINDOWED, window_share=0.0).sequence_cost(20.0, 4.0)
    attention = 0.25 * (full - 3.0 * 5) + 0.75 * (2.0 * 256 / 4 + 0.75 * 15)
    assert WINDOWED.sequence_cost(20.0, 4.0) == pytest.approx(attention + 3.0 * 5)
    # Within the window a sequence has a plain ring.
    assert WINDOWED.sequence_cost(8.0, 3.0) == replace(WINDOWED, window_share=0.0).sequence_cost(8.0, 3.0)
    lengths, widths = np.array([5.0, 9.0, 20.0, 500.0]), np.array([1.0, 3.0, 4.0, 2.0])
    one_by_one = [WINDOWED.sequence_cost(*pair) for pair in zip(lengths.tolist(), widths.tolist(), strict=True)]
    assert WINDOWED.sequence_cost(lengths, widths).tolist() == one_by_one


@pytest.mark.parametrize("share", [0.25, 0.75, 1.0])
@pytest.mark.parametrize("length", [5.0, 12.0, 400.0])
def test_shares_end_where_the_work_of_windows_does(share: float, length: float) -> None:
    cost = replace(WINDOWED, window_share=share)
    for part in (0.1, 0.5, 0.9, 1.0):
        end = float(cost.end_of_share(np.array(length), np.array(part), np.ones(())))
        wanted = part * (2.0 * cost.squares(length) + 3.0 * length)
        assert 2.0 * cost.squares(end) + 3.0 * end == pytest.approx(wanted)


def test_exposed_exchange_is_what_a_cheaper_link_would_save() -> None:
    lengths, widths = np.array([5.0, 9.0, 20.0, 500.0]), np.array([1.0, 3.0, 4.0, 2.0])
    for cost in (replace(WINDOWED, c=50.0), replace(WINDOWED, c=50.0, window_share=0.0)):
        free = replace(cost, c=0.0)
        exposed = cost.exposed_exchange(lengths, widths, widths - 1)
        np.testing.assert_allclose(exposed, cost.attention_cost(lengths, widths) - free.attention_cost(lengths, widths))
