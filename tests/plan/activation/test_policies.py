"""Properties of every policy on any machine: larger budgets never hurt, and no bound is exceeded."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest

from bytescale_ext.plan.activation.forecast import forecast
from bytescale_ext.plan.activation.load import LayerLoad, LayerSettings, Machine, cost_of_rates, layer_load
from bytescale_ext.plan.activation.plan import ActivationPlan
from bytescale_ext.plan.activation.policies import (
    in_gigabytes,
    least_budget,
    make_plan,
    memo_alpha,
    plan_offload,
)
from bytescale_ext.plan.cost.model_shape import LLAMA_7B

COST = cost_of_rates(LLAMA_7B, 600e12, 500e12, 400e12)
GROWING = ("device_bytes", "host_bytes", "link_bytes_per_second")


def cases(count: int = 40) -> list[tuple[LayerLoad, Machine]]:
    dice = random.Random(7)
    made = []
    for _ in range(count):
        load = layer_load(
            COST,
            dice.choice((2048, 8192, 65536)),
            width=dice.choice((1, 4)),
            settings=LayerSettings(dice.choice((4, 8, 32))),
        )
        load = replace(load, resident_layers=dice.choice((0, 2)), in_flight=dice.choice((1, 3)))
        whole = load.num_layers * load.in_flight * load.bytes_of()
        device = dice.uniform(0.2, 1.3) * whole + load.head_bytes
        made.append((load, Machine(device, dice.uniform(0.0, 1.2) * whole, dice.choice((5e9, 25e9, 55e9, 400e9)))))
    return made


def seconds(policy: str, load: LayerLoad, machine: Machine) -> float:
    """Return the predicted time of a policy; infinite if it does not fit."""
    try:
        found = forecast(make_plan(policy, load, machine), load, machine)
    except ValueError:
        return float("inf")
    return found.step_seconds if found.fits(machine) else float("inf")


@pytest.mark.parametrize("resource", GROWING)
@pytest.mark.parametrize("policy", ["priced", "auto"])
def test_more_of_a_machine_is_never_slower(policy: str, resource: str) -> None:
    fitted = 0
    for load, machine in cases():
        times = [
            seconds(policy, load, replace(machine, **{resource: factor * getattr(machine, resource)}))
            for factor in (1.0, 1.5, 4.0)
        ]
        assert times == sorted(times, reverse=True) or max(times) - min(times) <= 1e-9 * min(times)
        fitted += times[-1] < float("inf")
    assert fitted > 20


def test_memo_swaps_as_much_as_its_bounds_allow_and_no_more() -> None:
    bound_by = {"link": 0, "host": 0, "all": 0}
    for load, machine in cases():
        try:
            alpha = memo_alpha(load, machine)
        except ValueError:
            continue
        layers = load.in_flight * (load.num_layers - load.resident_layers)
        moved = load.bytes_of("input") + alpha * load.bytes_of("matrix", "cheap")
        hidden = load.forward_seconds * machine.link_bytes_per_second
        assert 0 <= alpha <= 1
        if 0 < alpha:
            assert moved <= hidden * (1 + 1e-9)
            assert layers * moved <= machine.host_bytes * (1 + 1e-9)
        if alpha < 1:
            near = {"link": moved >= hidden * (1 - 1e-9), "host": layers * moved >= machine.host_bytes * (1 - 1e-9)}
            assert any(near.values())
            for name, is_near in near.items():
                bound_by[name] += is_near
        else:
            bound_by["all"] += 1
    assert all(bound_by.values()), bound_by


def test_offloading_grows_as_the_device_shrinks_and_fills_it_exactly() -> None:
    load = layer_load(COST, 65536, LayerSettings())
    whole = forecast(ActivationPlan("none"), load, Machine(0.0, 1e15)).device_bytes
    shares = []
    for part in (1.1, 1.0, 0.9, 0.6, 0.3, 0.05):
        machine = Machine(part * whole, 1e15)
        plan = plan_offload(load, machine)
        shares.append(plan.swap)
        used = forecast(plan, load, machine).device_bytes
        assert used <= machine.device_bytes * (1 + 1e-9) or plan.swap == 1
        assert used >= machine.device_bytes * (1 - 1e-9) or plan.swap in (0.0, 1.0)
        assert plan.recompute == 0
        assert plan.input_swap == plan.swap
    assert shares == sorted(shares)
    assert shares[0] == shares[1] == pytest.approx(0.0, abs=1e-9)
    assert 0 < shares[2] < 1


@pytest.mark.parametrize("policy", ["priced", "auto"])
def test_what_fits_nowhere_names_the_host_memory_that_would_do(policy: str) -> None:
    load = layer_load(COST, 65536, LayerSettings(loss_tokens=1024))
    with pytest.raises(ValueError, match=r"65536 tokens do not fit in 1 GB of device.*even with enough") as error:
        make_plan(policy, load, Machine(1e9, 1e9))
    named = 1e9 * float(re.findall(r"takes ([\d.]+) GB", str(error.value))[0])
    make_plan(policy, load, Machine(named, 1e15))
    with pytest.raises(ValueError, match=r"it fits with .* GB of host memory") as error:
        make_plan(policy, load, Machine(30e9, 1e9))
    named = 1e9 * float(re.findall(r"fits with ([\d.]+) GB", str(error.value))[0])
    make_plan(policy, load, Machine(30e9, named))
    with pytest.raises(ValueError, match="do not fit"):
        make_plan(policy, load, Machine(30e9, 0.99 * named))


def test_least_budgets() -> None:
    assert least_budget(lambda size: size >= 3.0, 1000.0) == pytest.approx(3.0, rel=1e-3)
    assert least_budget(lambda size: size >= 3.0, 1000.0) >= 3.0
    assert least_budget(lambda size: True, 1000.0) <= 1e-3
    assert least_budget(lambda size: False, 1000.0) is None
    assert in_gigabytes(2_000_000_100) == "2.001"
    assert in_gigabytes(2_000_000_000) == "2.000"
