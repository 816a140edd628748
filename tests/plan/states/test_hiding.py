"""Overlap of a step's copies, for long and short documents."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bytescale_ext.plan.activation.load import cost_of_rates, layer_seconds
from bytescale_ext.plan.cost.model_shape import LLAMA_7B
from bytescale_ext.plan.states.forecast import StateCase
from bytescale_ext.plan.states.hiding import Computing, computing_of, hiding
from bytescale_ext.plan.states.timeline import Speeds

COST = cost_of_rates(LLAMA_7B, 600e12, 500e12, 400e12)
CASE = StateCase(LLAMA_7B.part(4), 1, True, True, 2, 1, 1 << 22)
ENDS = CASE.with_layers(0).num_parameters
OF_LAYERS = 2 * (CASE.num_parameters - ENDS)  # bytes
SPEEDS = Speeds(50e9, 20e9)
LONG, NONE = (Computing(1.0, 100.0, 200.0),), (Computing(1.0, 0.0, 0.0),)


def test_micro_batches_of_a_corpus() -> None:
    """A document on three ranks is three micro-batches; 16 short documents of half the tokens are eight."""
    long, short = computing_of(COST, [24576, *[4096] * 16, 0], 8192)
    assert (long.share, short.share) == (pytest.approx(3 / 11), pytest.approx(8 / 11))
    assert (long.forward_seconds, long.backward_seconds) == layer_seconds(COST, 24576, 3)
    forward, backward = layer_seconds(COST, 4096)
    assert short.forward_seconds == pytest.approx(2 * forward)
    assert short.backward_seconds == pytest.approx(2 * backward)
    assert long.forward_seconds > short.forward_seconds


def test_copies_of_the_first_stage_hide_behind_adam_alone() -> None:
    found = hiding(CASE, LONG, 4, SPEEDS)
    assert found.num_bytes == 6 * CASE.num_parameters
    assert found.computing_bytes == 0
    assert found.adam_bytes == pytest.approx(found.num_bytes)
    slow_link = hiding(CASE, LONG, 4, replace(SPEEDS, link_bytes_per_second=1e9))
    adam_bytes = 28 / 20e9 * 1e9 * CASE.num_parameters  # in each direction, while Adam runs
    assert slow_link.adam_bytes == pytest.approx(2 * min(adam_bytes, 2 * CASE.num_parameters), rel=0.4)
    assert slow_link.waited_bytes > 0


def test_gradients_hide_behind_long_backward_passes_but_for_the_ends() -> None:
    case = replace(CASE, stage=2)
    found = hiding(case, LONG, 4, SPEEDS)
    assert found.num_bytes == pytest.approx((4 * 2 + 2) * CASE.num_parameters)
    assert found.computing_bytes == pytest.approx(4 * OF_LAYERS)
    assert found.adam_bytes == pytest.approx(2 * CASE.num_parameters)
    assert found.waited_bytes == pytest.approx(4 * 2 * ENDS)
    assert hiding(case, NONE, 4, SPEEDS).computing_bytes == 0
    half = hiding(case, (Computing(0.5, 100.0, 200.0), Computing(0.5, 0.0, 0.0)), 4, SPEEDS)
    assert half.computing_bytes == pytest.approx(2 * OF_LAYERS)


def test_parameters_hide_behind_both_passes_of_a_window() -> None:
    case = replace(CASE, stage=3)
    found = hiding(case, LONG, 2, SPEEDS)
    assert found.num_bytes == pytest.approx(2 * 2 * CASE.num_parameters + 2 * 2 * OF_LAYERS + 2 * ENDS)
    assert found.computing_bytes == pytest.approx(2 * 3 * OF_LAYERS)
    alone = hiding(replace(case, window_layers=1), LONG, 2, SPEEDS)
    assert alone.computing_bytes == pytest.approx(2 * OF_LAYERS)  # only gradients
    seconds = OF_LAYERS / 4 / 50e9  # bytes of a layer
    short = hiding(case, (Computing(1.0, seconds / 4, seconds / 2),), 2, SPEEDS)
    assert short.computing_bytes == pytest.approx(2 * (1 / 4 + 1 / 2 + 1 / 2) * OF_LAYERS)
