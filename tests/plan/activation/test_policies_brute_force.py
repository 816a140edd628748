"""Policies against brute force over random loads, and on a 7B model."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from bytescale_ext.plan.activation.forecast import forecast
from bytescale_ext.plan.activation.load import LayerSettings, layer_load
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
from tests.plan.activation.random_loads import COST, H200, LLAMA2_7B, random_load, random_machine

KIB = 1024
JOINED = LayerOperators(joined_norms=True)


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


@pytest.mark.full
@pytest.mark.slow
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


@pytest.mark.slow
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


def test_fused_norms_are_never_rebuilt() -> None:
    kinds = {tensor.name: tensor.kind for tensor in layer_tensors(LLAMA2_7B, operators=JOINED)}
    assert kinds["input norm output"] == kinds["MLP norm output"] == "input"
    sparse = replace(LLAMA2_7B, num_expert_layers=32, expert_ffn_hidden=1024, num_experts=8)
    kinds = {tensor.name: tensor.kind for tensor in layer_tensors(sparse, operators=JOINED)}
    assert kinds["input norm output"] == "input"
    assert kinds["MLP norm output"] == "cheap"
    plain, fused = layer_load(COST, 65536, LayerSettings()), layer_load(COST, 65536, LayerSettings(operators=JOINED))
    assert plan_memo(fused, H200).swap < plan_memo(plain, H200).swap
