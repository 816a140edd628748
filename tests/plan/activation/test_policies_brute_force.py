"""Policies against brute force over random loads, and on a 7B model."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from bytescale_ext.plan.activation.forecast import forecast
from bytescale_ext.plan.activation.load import LayerSettings, Machine, layer_load
from bytescale_ext.plan.activation.operators import LayerOperators
from bytescale_ext.plan.activation.plan import ActivationPlan
from bytescale_ext.plan.activation.policies import (
    make_plan,
    memo_alpha,
    plan_auto,
    plan_memo,
    plan_offload,
    plan_priced,
)
from bytescale_ext.plan.activation.tensors import layer_tensors
from tests.plan.activation.random_loads import COST, H200, LLAMA2_7B, load_of, random_load, random_machine

KIB = 1024
JOINED = LayerOperators(joined_norms=True)


@pytest.mark.parametrize(("length", "expected"), [(16384, 0.26), (32768, 0.37), (65536, 0.58), (98304, 0.79)])
def test_memo_alpha_of_a_7b_layer(length: int, expected: float) -> None:
    assert memo_alpha(load_of(length), H200) == pytest.approx(expected, abs=0.01)


def test_memo_alpha_is_bound_by_host_memory() -> None:
    load = load_of(131072)
    machine = replace(H200, host_bytes=100e9)
    alpha = memo_alpha(load, machine)
    assert 0 < alpha < memo_alpha(load, H200)
    assert forecast(plan_memo(load, machine), load, machine).host_bytes == pytest.approx(100e9)
    with pytest.raises(ValueError, match=r"need 64.* GB of host memory"):
        memo_alpha(load, replace(H200, host_bytes=10e9))


def test_memo_alpha_against_brute_force() -> None:
    dice = random.Random(1)
    for _ in range(300):
        load = random_load(dice)
        machine = random_machine(dice, load)
        always, others = load.bytes_of("input"), load.bytes_of("matrix", "cheap")
        layers = load.in_flight * (load.num_layers - load.resident_layers)
        tried = []
        for alpha in np.linspace(0, 1, 401):
            moved = always + float(alpha) * others
            hides = moved / machine.link_bytes_per_second <= load.forward_seconds
            if hides and layers * moved <= machine.host_bytes:
                tried.append(float(alpha))
        if layers * always > machine.host_bytes:
            with pytest.raises(ValueError, match="host memory"):
                memo_alpha(load, machine)
        else:
            assert memo_alpha(load, machine) == pytest.approx(max(tried, default=0.0), abs=1 / 400)


def test_priced_is_the_best_of_all_shares() -> None:
    dice = random.Random(2)
    grid = np.linspace(0, 1, 9)
    found = 0
    for _ in range(40):
        load = random_load(dice)
        machine = random_machine(dice, load)
        tried = [
            forecast(plan, load, machine).step_seconds
            for swap, keep, inputs in itertools.product(grid, grid, grid)
            if swap + keep <= 1
            for resident in range(load.resident_layers, load.num_layers)
            for plan in [ActivationPlan("priced", swap, 1 - swap - keep, inputs, True, resident)]
            if forecast(plan, load, machine).fits(machine)
        ]
        try:
            plan = plan_priced(load, machine)
        except ValueError:
            assert not tried
            continue
        prediction = forecast(plan, load, machine)
        assert prediction.fits(machine)
        assert not tried or prediction.step_seconds <= min(tried) * (1 + 1e-9)
        found += bool(tried)
    assert found > 20


def test_auto_is_no_slower_than_any_policy_that_fits() -> None:
    dice = random.Random(3)
    for _ in range(100):
        load = random_load(dice)
        machine = random_machine(dice, load)
        seconds = []
        for policy in ("none", "memo", "priced", "offload"):
            try:
                prediction = forecast(make_plan(policy, load, machine), load, machine)
            except ValueError:
                continue
            if prediction.fits(machine):
                seconds.append(prediction.step_seconds)
        if seconds:
            assert forecast(plan_auto(load, machine), load, machine).step_seconds == min(seconds)
        else:
            with pytest.raises(ValueError, match="GB of device memory"):
                plan_auto(load, machine)


def test_nothing_is_done_where_everything_fits() -> None:
    assert plan_auto(load_of(8192, 8), H200).policy == "none"
    assert plan_priced(load_of(8192, 8), H200).is_off
    assert plan_offload(load_of(8192, 8), H200).is_off


def test_free_device_memory_keeps_tensors() -> None:
    load = load_of(32768)
    seconds = []
    for device_bytes in (20e9, 40e9, 80e9, 160e9):
        machine = replace(H200, device_bytes=device_bytes)
        plan = plan_priced(load, machine)
        prediction = forecast(plan, load, machine)
        assert prediction.fits(machine)
        seconds.append(prediction.step_seconds)
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] < seconds[0]


def test_priced_hides_everything_earlier_than_memo() -> None:
    """Swapping 91 KiB and not 129 for each token: from 79,000 tokens on instead of 130,000."""

    def first(make: str) -> int:
        lengths = range(40 * KIB, 160 * KIB, KIB)
        tight = Machine(device_bytes=0.0, host_bytes=1e15)
        for length in lengths:
            load = load_of(length)
            moved = load.bytes_of("input", "matrix") if make == "priced" else load.bytes_of()
            if moved / tight.link_bytes_per_second <= load.forward_seconds:
                return length // KIB
        return 0

    assert first("priced") == pytest.approx(79, abs=2)
    assert first("memo") == pytest.approx(127, abs=2)  # 130,000 tokens
    load = load_of(80 * KIB)
    tight = Machine(forecast(plan_memo(load, H200), load, H200).device_bytes, 1e15)
    assert plan_priced(load, tight).recompute == 0.0
    assert plan_memo(load, tight).recompute > 0.2


def test_gains_over_full_recompute_are_those_expected() -> None:
    """7B width, 8 layers (a note's table): 1.12 to 1.27 over full recompute, growing with the length."""
    for length, expected in ((16384, 1.18), (65536, 1.264), (131072, 1.267)):
        load = load_of(length, 8)
        full = 8 * (2 * load.forward_seconds + load.backward_seconds)
        tight = Machine(forecast(plan_memo(load, H200), load, H200).device_bytes, 1e15)
        assert full / forecast(plan_priced(load, tight), load, tight).step_seconds == pytest.approx(expected, abs=0.04)


def test_offload_takes_the_least_share_that_fits() -> None:
    dice = random.Random(4)
    for _ in range(200):
        load = random_load(dice)
        machine = replace(random_machine(dice, load), host_bytes=1e15)
        plan = plan_offload(load, machine)
        assert plan.recompute == 0
        assert plan.swap == plan.input_swap
        if forecast(plan, load, machine).fits(machine) and plan.swap:
            less = replace(plan, swap=plan.swap * 0.98, input_swap=plan.input_swap * 0.98)
            assert not forecast(less, load, machine).fits(machine)


def test_unknown_policy() -> None:
    with pytest.raises(ValueError, match="choose one of none, memo"):
        make_plan("swap", load_of(1024), H200)


def test_fused_norms_are_never_rebuilt() -> None:
    kinds = {tensor.name: tensor.kind for tensor in layer_tensors(LLAMA2_7B, operators=JOINED)}
    assert kinds["input norm output"] == kinds["MLP norm output"] == "input"
    sparse = replace(LLAMA2_7B, num_expert_layers=32, expert_ffn_hidden=1024, num_experts=8)
    kinds = {tensor.name: tensor.kind for tensor in layer_tensors(sparse, operators=JOINED)}
    assert kinds["input norm output"] == "input"
    assert kinds["MLP norm output"] == "cheap"
    plain, fused = layer_load(COST, 65536), layer_load(COST, 65536, how=LayerSettings(operators=JOINED))
    assert plan_memo(fused, H200).swap < plan_memo(plain, H200).swap
