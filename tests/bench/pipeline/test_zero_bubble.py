"""What weight gradients that wait for idle time would gain."""

from __future__ import annotations

import pytest

from bytescale_ext.plan.schedule.actions import bubble_of_equal_costs, seq1f1b_schedule
from bytescale_ext.plan.schedule.compare import PAPER_MODELS, SliceModel, evaluate, lengths_of
from bytescale_ext.plan.schedule.slices import layer_cost, slice_costs
from bytescale_ext.plan.step.sizes import Slicing
from scripts.bench.pipeline.zero_bubble import SplitCosts, split_costs, zero_bubble_share

GPT = SliceModel(PAPER_MODELS["gpt-7b"].shape, 16384, 8)


def test_weight_gradients_fill_gaps() -> None:
    schedule = seq1f1b_schedule(4, 8)
    nothing_to_move = zero_bubble_share(schedule, SplitCosts((1.0,), (2.0,), (0.0,)))
    assert nothing_to_move == pytest.approx(bubble_of_equal_costs(4, 8))
    # ZB-H1 (Qi et al. 2023, Table 2): idle (p - 1)(F + B - W) for equal F, B and W, a third of 1F1B's.
    assert zero_bubble_share(schedule, SplitCosts((1.0,), (1.0,), (1.0,))) == pytest.approx(3 / 27, abs=1e-9)
    model = SliceModel(PAPER_MODELS["gpt-7b"].shape, 131072, 8)
    lengths = lengths_of(model, 4, "time")
    costs = split_costs(model, lengths)
    share = zero_bubble_share(seq1f1b_schedule(4, 8, Slicing(4)), costs)
    assert share < evaluate(model, 4, 8, Slicing(4)).bubble < share + 0.02


def test_split_costs_are_the_whole_backward_pass() -> None:
    lengths = lengths_of(GPT, 4, "time")
    costs, cost = split_costs(GPT, lengths), layer_cost(GPT.shape, "time")
    both = [one + other for one, other in zip(costs.inputs, costs.weights, strict=True)]
    assert both == pytest.approx(slice_costs(lengths, cost.backward))
    assert costs.forward == pytest.approx(slice_costs(lengths, cost.forward))
    assert sum(costs.weights) == pytest.approx(cost.backward.b * GPT.seq_length / 2)


@pytest.mark.parametrize("num_stages", [1, 2, 4, 8])
@pytest.mark.parametrize("num_slices", [1, 3])
def test_waiting_weight_gradients_never_make_it_slower(num_stages: int, num_slices: int) -> None:
    schedule = seq1f1b_schedule(num_stages, 10, Slicing(num_slices))
    shares = []
    for weight in (0.0, 0.3, 0.6, 1.0):
        costs = SplitCosts((1.0,) * num_slices, (2.0 - weight,) * num_slices, (weight,) * num_slices)
        shares.append(zero_bubble_share(schedule, costs))
    assert all(0 <= share < 1 for share in shares) or num_stages == 1
    assert shares[0] == pytest.approx(bubble_of_equal_costs(num_stages, 10, num_slices))
    assert all(share <= shares[0] + 1e-9 for share in shares)
    assert num_stages == 1 or shares[-1] < shares[0]
