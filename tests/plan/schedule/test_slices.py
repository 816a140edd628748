"""Slices of a sequence: equal in the chosen quantity, and refusals that name the nearest valid sizes."""

from __future__ import annotations

import random
import re

import pytest

from bytescale_ext.plan.cost.cost_model import CostModel
from bytescale_ext.plan.cost.model_cost import ModelCost
from bytescale_ext.plan.schedule.compare import PAPER_MODELS
from bytescale_ext.plan.schedule.slices import (
    PARTITIONS,
    layer_cost,
    parse_partition,
    slice_costs,
    slice_lengths,
)
from tests.sample import seeds

GPT_7B = PAPER_MODELS["gpt-7b"].shape


def test_slices_of_equal_flops_are_the_papers() -> None:
    cost = layer_cost(GPT_7B, "flops").both
    assert slice_lengths(131072, 4, "flops", cost) == (56064, 30720, 23936, 20352)


@pytest.mark.parametrize("seed", seeds(60))
def test_partitions_cover_the_sequence_and_are_equal_in_cost(seed: int) -> None:
    rng = random.Random(seed)
    multiple = rng.choice((1, 2, 8))
    num_slices = rng.randint(1, 9)
    num_tokens = multiple * rng.randint(num_slices * 40, 4000)
    cost = CostModel(a=rng.choice((0.0, 1e-3, 1.0)), b=rng.choice((1e-2, 1.0)))
    for partition in PARTITIONS:
        lengths = slice_lengths(num_tokens, num_slices, partition, cost, multiple)
        assert sum(lengths) == num_tokens
        assert len(lengths) == num_slices
        assert all(length > 0 and length % multiple == 0 for length in lengths)
        unit = CostModel(0.0, 1.0) if partition == "even" else cost
        costs = slice_costs(lengths, unit)
        # Each bound is off by at most half a multiple (or tile), so a slice is off by the cost of one multiple at its
        # end.
        one = (2 * unit.a * num_tokens + unit.b) * (128 if num_tokens >= 64 * 128 * num_slices else multiple)
        assert max(costs) - min(costs) <= 2 * one + 1e-9 * sum(costs)


def test_long_slices_end_at_tiles_and_short_ones_need_not() -> None:
    cost = layer_cost(GPT_7B, "time").both
    assert all(length % 128 == 0 for length in slice_lengths(131072, 4, "time", cost))
    assert any(length % 128 for length in slice_lengths(4096, 4, "time", cost))
    assert sum(slice_lengths(131070, 4, "time", cost)) == 131070


def test_costs_of_slices_add_up_to_the_sequence() -> None:
    cost = CostModel(a=0.5, b=3.0, g=7.0)
    assert sum(slice_costs((5, 2, 9), cost)) == pytest.approx(cost.sequence_cost(16, 1) + 3 * 7.0)
    assert slice_costs((5, 2), cost) == (0.5 * 25 + 15 + 7, 0.5 * (49 - 25) + 6 + 7)


def test_time_takes_the_measured_costs_or_attentions_slower_backward() -> None:
    flops, guess = layer_cost(GPT_7B, "flops"), layer_cost(GPT_7B, "time")
    assert guess.backward.a == pytest.approx(1.25 * flops.backward.a)
    assert guess.backward.b == flops.backward.b
    measured = ModelCost(
        GPT_7B, "none", "float32", 1, "a test", CostModel(1.0, 2.0), CostModel(3.0, 4.0), 0.0, 0.0, 1.0, 1.0
    )
    assert layer_cost(GPT_7B, "time", measured).both == CostModel(4.0, 6.0)
    assert layer_cost(GPT_7B, "flops", measured) == flops


def test_partition_by_name_and_by_list() -> None:
    assert [parse_partition(name) for name in PARTITIONS] == list(PARTITIONS)
    assert parse_partition("5,3,1") == (5, 3, 1)
    with pytest.raises(ValueError, match="time, flops, even, or the tokens of each slice"):
        parse_partition("equal")


REFUSED = (
    ((12, 0, "even", 1), "0 slices of a sequence: use 1 or more"),
    ((12, 7, "even", 2), "7 slices of at least 2 tokens each; use at most 6 slices"),
    ((3, 4, "even", 1), "4 slices of at least a token each; use at most 3 slices"),
    ((13, 2, "even", 4), "a multiple of 4 tokens .* are 12 or 16"),
    ((3, 1, "even", 4), "the nearest possible lengths are 4"),
    ((12, 2, (5, 5), 1), "give 2 slices of 12 tokens in total; the nearest lengths that fit are 6,6"),
    ((12, 2, (5, 7), 2), "each a multiple of 2; the nearest lengths that fit are 6,6"),
    ((12, 2, (12, 0), 1), "the nearest lengths that fit are 11,1"),
    ((12, 3, (6, 6), 1), "give 3 slices of 12 tokens in total; the nearest lengths that fit are 5,4,3"),
)


@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_refusals_name_the_nearest(arguments: tuple, message: str) -> None:
    num_tokens, num_slices, partition, multiple = arguments
    with pytest.raises(ValueError, match=message) as error:
        slice_lengths(num_tokens, num_slices, partition, None, multiple)
    found = re.search(r"nearest lengths that fit are ([\d,]+)", str(error.value))
    if found:
        nearest = parse_partition(found[1])
        assert slice_lengths(num_tokens, num_slices, nearest, None, multiple) == nearest


def test_costs_are_needed_for_time() -> None:
    with pytest.raises(ValueError, match="'time' needs the cost of tokens"):
        slice_lengths(12, 2, "time")
