"""Validator of activation plans: valid plans pass, and a violation of each rule is refused with its name."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from bytescale_ext.errors import PlanError
from bytescale_ext.plan.activation import policies
from bytescale_ext.plan.activation.check import check_activation_plan
from bytescale_ext.plan.activation.forecast import forecast
from bytescale_ext.plan.activation.load import HeldSlices, LayerLoad, Machine
from bytescale_ext.plan.activation.plan import ActivationPlan
from bytescale_ext.plan.activation.policies import POLICIES, make_plan
from tests.plan.activation.random_loads import H200, load_of, random_load, random_machine, random_sliced_load

LOAD = load_of(65536)
TIGHT = replace(H200, device_bytes=40e9)


def damaged(plan: ActivationPlan, **changes: Any) -> ActivationPlan:
    """Return a copy with other fields, without the checks of the constructor."""
    copy = replace(plan)
    for name, value in changes.items():
        object.__setattr__(copy, name, value)
    return copy


def with_kind(load: LayerLoad, name: str, kind: str) -> LayerLoad:
    """Return the load with another kind of one tensor."""
    return replace(load, tensors=tuple(replace(t, kind=kind) if t.name == name else t for t in load.tensors))


@pytest.mark.parametrize(
    ("policy", "changes", "law"),
    [
        ("memo", {"swap": 1.4, "recompute": -0.4}, "a share of input norm output is outside 0 to 1"),
        ("memo", {"input_swap": 1.5}, "a share of layer input is outside 0 to 1"),
        ("memo", {"input_swap": float("nan")}, "a share of layer input is outside 0 to 1"),
        ("memo", {"swap": 0.5, "recompute": 1.0}, "the shares of input norm output sum to 1.5"),
        ("memo", {"resident_layers": 1}, "1 layers are resident; at least the last 2 must be"),
        ("priced", {"resident_layers": 33}, "33 layers are resident, but the rank has 32"),
        ("memo", {"input_swap": 0.5}, "memo swaps every input"),
        ("memo", {"recompute": 0.0}, "memo swaps every input, and swaps or recomputes all of the rest"),
        ("memo", {"rebuild_cheap": True}, "memo swaps every input"),
        ("memo", {"policy": "none"}, "none keeps everything"),
        ("priced", {"rebuild_cheap": False}, "priced rebuilds what is cheap"),
        ("offload", {"input_swap": 0.0}, "offload swaps one share of every tensor"),
        ("offload", {"recompute": 0.01}, "offload swaps one share of every tensor and recomputes nothing"),
        ("offload", {"rebuild_cheap": True}, "offload swaps one share of every tensor"),
        ("offload", {"policy": "swap"}, "the policy swap is unknown"),
        ("memo", {"swap": 1.0, "recompute": 0.0}, "the copy of a layer takes"),
    ],
)
def test_a_damaged_plan_breaks_its_law(policy: str, changes: dict[str, Any], law: str) -> None:
    plan = make_plan(policy, LOAD, TIGHT)
    check_activation_plan(plan, LOAD, TIGHT)
    with pytest.raises(PlanError) as caught:
        check_activation_plan(damaged(plan, **changes), LOAD, TIGHT)
    assert law in str(caught.value)


@pytest.mark.parametrize("name", ["layer input", "attention output", "attention log-sum-exp"])
def test_inputs_and_attention_are_never_recomputed(name: str) -> None:
    plan = make_plan("memo", LOAD, TIGHT)
    with pytest.raises(PlanError, match=f"{name} is recomputed") as caught:
        check_activation_plan(plan, with_kind(LOAD, name, "matrix"), TIGHT)
    (marked,) = [line for line in str(caught.value).splitlines() if line.startswith(">>")]
    assert name in marked
    assert "policy memo, 2 of 32 layers resident" in str(caught.value)


@pytest.mark.slow
def test_budgets_are_those_of_the_machine() -> None:
    """The walk through the layers and the forecast agree to the byte, so a smaller budget is refused."""
    dice = random.Random(5)
    refused = {"host": 0, "device": 0}
    for number in range(200):
        load = random_sliced_load(dice) if number % 3 == 0 else random_load(dice)
        machine = random_machine(dice, load)
        for policy in POLICIES:
            try:
                plan = make_plan(policy, load, machine)
            except PlanError:
                raise
            except ValueError:
                continue
            needed = forecast(plan, load, machine)
            exact = replace(machine, device_bytes=needed.device_bytes, host_bytes=needed.host_bytes)
            check_activation_plan(plan, load, exact, fits=True)
            for name in refused:
                budget = getattr(exact, f"{name}_bytes")
                if budget:
                    with pytest.raises(PlanError, match=f"bytes of {name} memory"):
                        check_activation_plan(plan, load, replace(exact, **{f"{name}_bytes": 0.999 * budget}), True)
                    refused[name] += 1
    assert min(refused.values()) > 100


def test_more_layers_in_flight_than_planned_break_the_device_budget() -> None:
    plan = make_plan("priced", LOAD, TIGHT)
    check_activation_plan(plan, LOAD, TIGHT, fits=True)
    keys = HeldSlices(1.0, 1.0, 1e12)
    for change in (
        {"in_flight": 2}, {"num_layers": 48}, {"head_bytes": 1e12}, {"num_tokens": 131072}, {"slices": (keys,)},
    ):  # fmt: skip
        with pytest.raises(PlanError, match="bytes of device memory"):
            check_activation_plan(plan, replace(LOAD, **change), TIGHT, fits=True)


def test_plans_are_checked_where_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def greedy(load: LayerLoad, machine: Machine) -> ActivationPlan:
        return ActivationPlan("priced", 0.0, 0.0, 0.0, True, 2)

    monkeypatch.setattr(policies, "plan_priced", greedy)
    with pytest.raises(PlanError, match="bytes of device memory"):
        make_plan("priced", LOAD, TIGHT)
