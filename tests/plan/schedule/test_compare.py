"""Comparison of schedules."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bytescale_ext.plan.activation.load import cost_of_rates
from bytescale_ext.plan.schedule.actions import bubble_of_equal_costs, seq1f1b_schedule
from bytescale_ext.plan.schedule.compare import (
    PAPER_MODELS,
    SliceModel,
    compare_schedules,
    model_slice_lengths,
    schedule_figures,
    simulate_model,
)
from bytescale_ext.plan.schedule.slices import slice_costs
from bytescale_ext.plan.step.sizes import Slicing

GPT = SliceModel(PAPER_MODELS["gpt-7b"].shape, 16384, 8)
MEASURED = replace(GPT, measured=cost_of_rates(GPT.shape, 600e12, 500e12, 400e12, 8))


@pytest.mark.parametrize(
    ("num_stages", "num_slices", "num_chunks", "partition", "count"),
    [(4, 4, 2, "time", 6), (4, 4, 2, "even", 4), (4, 1, 2, "time", 2), (2, 4, 2, "time", 3), (4, 4, 1, "flops", 3)],
)
def test_rows_are_those_that_can_run(
    num_stages: int, num_slices: int, num_chunks: int, partition: str, count: int
) -> None:
    rows = compare_schedules(GPT, num_stages, 8, Slicing(num_slices), num_chunks, partition)
    names = [row.name for row in rows]
    assert len(names) == len(set(names)) == count
    assert names[0] == "1F1B"
    assert all(sum(row.slices) == GPT.seq_length for row in rows)
    assert any("-I" in name for name in names) == (num_chunks > 1 and num_stages > 2)


@pytest.mark.parametrize("num_chunks", [1, 2])
def test_one_slice_is_the_formula_and_slices_beat_it(num_chunks: int) -> None:
    whole = schedule_figures(GPT, 4, 8, Slicing(), num_chunks, "even")
    assert whole.bubble == pytest.approx(bubble_of_equal_costs(4, 8, 1, num_chunks))
    cut = schedule_figures(GPT, 4, 8, Slicing(4), num_chunks)
    assert cut.bubble < whole.bubble
    assert cut.activation_bytes < whole.activation_bytes
    assert cut.bubble >= cut.bubble_of_equal_costs - 1e-9
    assert cut.relative_time == pytest.approx(1 / (1 - cut.bubble))


def test_activations_are_those_of_the_slices_held() -> None:
    figures = schedule_figures(GPT, 4, 8, Slicing(4), 1, "even")
    assert figures.peak_slices == 4 + 4 - 1
    assert figures.slices == (4096,) * 4
    assert figures.peak_micro_batches == pytest.approx(7 / 4)
    layers = GPT.shape.num_layers / 4
    # Sums of the gradients of keys and values of 3 slices, in float32, with as many heads as queries.
    sums = 3 * 4096 * layers * 2 * GPT.shape.hidden * 4 / 8
    assert figures.activation_bytes == pytest.approx(7 * 4096 * layers * 34 * GPT.shape.hidden / 8 + sums)
    measured = schedule_figures(MEASURED, 4, 8, Slicing(4), 1, "even")
    sums = 3 * 4096 * layers * MEASURED.sum_bytes()
    assert measured.activation_bytes == pytest.approx(7 * 4096 * layers * MEASURED.layer_bytes() + sums)
    whole = schedule_figures(GPT, 4, 8, Slicing(), 1, "even")
    assert whole.activation_bytes == pytest.approx(4 * 16384 * layers * 34 * GPT.shape.hidden / 8)


def test_a_measured_model_runs_in_its_seconds() -> None:
    schedule = seq1f1b_schedule(4, 8, Slicing(2))
    lengths = model_slice_lengths(MEASURED, 2, "time")
    cost = MEASURED.measured.stage(GPT.shape.num_layers // 4)
    work = 8 * (sum(slice_costs(lengths, cost.forward)) + sum(slice_costs(lengths, cost.backward)))
    assert simulate_model(MEASURED, schedule, lengths).busy == pytest.approx((work,) * 4)
