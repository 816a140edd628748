from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bytescale_ext.plan.cost.model_shape import LLAMA_7B
from bytescale_ext.plan.experts.cost import ExpertCost, balance_ratio, rank_seconds, step_seconds
from bytescale_ext.plan.experts.placement import PARTS, home_parts

SHAPE = replace(
    LLAMA_7B, num_expert_layers=32, num_experts=8, experts_per_token=2, expert_ffn_hidden=2 * 1000 + 96,
    shared_ffn_hidden=96,
)  # fmt: skip
LOADS = np.array([[10, 0, 30, 0], [10, 20, 0, 0]])  # tokens of ranks 0 and 1 for experts 0 to 3


def test_constants_of_a_model() -> None:
    weights = 3 * 4096 * 1000
    cost = ExpertCost.of(SHAPE, flops=1e12, link_bytes=1e9, micro_batches=3)
    assert cost.token_seconds == pytest.approx(6 * weights / 1e12)
    assert cost.exchange_seconds == pytest.approx(2 * 4096 / 1e9)
    assert 2 * cost.copy_seconds == pytest.approx((1 + 3) * 2 * weights / 1e9), "weights once, gradients three times"
    assert ExpertCost.of(SHAPE, 1e12, 1e9).with_micro_batches(3) == cost
    plain = ExpertCost.of(replace(SHAPE, gated=False), 1e12, 1e9)
    assert plain.token_seconds == pytest.approx(cost.token_seconds * 2 / 3)
    latent = ExpertCost.of(replace(SHAPE, expert_latent=1024), 1e12, 1e9, 3)
    parts = (latent.token_seconds, latent.exchange_seconds, latent.copy_seconds)
    assert [4 * part for part in parts] == [cost.token_seconds, cost.exchange_seconds, cost.copy_seconds]


def test_each_part_of_the_time() -> None:
    tokens, nothing = np.array([[20, 20, 0, 0], [0, 0, 30, 0]]), np.zeros((2, 4), bool)
    assert rank_seconds(tokens, nothing, LOADS, ExpertCost(1.0, 0.0, 0.0)).tolist() == [40, 30]
    # rank 0 sends 30 tokens of expert 2 and receives 10 of expert 0 and 20 of expert 1
    assert rank_seconds(tokens, nothing, LOADS, ExpertCost(0.0, 1.0, 0.0)).tolist() == [4 * 30, 4 * 30]
    held = nothing.copy()
    held[1, 0] = held[1, 1] = True
    assert rank_seconds(tokens, held, LOADS, ExpertCost(0.0, 0.0, 1.0)).tolist() == [2 * 2, 2 * 2]
    held[1, 1] = False
    held[0, 3] = True
    assert rank_seconds(tokens, held, LOADS, ExpertCost(0.0, 0.0, 1.0)).tolist() == [2, 2]


def test_a_step_is_as_long_as_its_slowest_rank() -> None:
    parts = home_parts(4, 2)
    assert step_seconds(parts, LOADS, ExpertCost(1.0, 0.0, 0.0)) == 40
    parts[:, 0] = PARTS // 2
    assert step_seconds(parts, LOADS, ExpertCost(1.0, 0.0, 0.0)) == 40
    assert step_seconds(parts, LOADS, ExpertCost(0.0, 0.0, 1.0)) == 2
    assert step_seconds(parts, LOADS, ExpertCost(0.0, 1.0, 0.0)) == 4 * 30


def test_balance() -> None:
    assert balance_ratio(home_parts(4, 2), LOADS) == pytest.approx(40 / 35)
    assert balance_ratio(home_parts(4, 2), 0 * LOADS) == 1.0
