"""Choice of model states with activations, against all options and plans of a grid, and effects of more memory."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial

import pytest

from bytescale_ext.plan.activation.forecast import forecast
from bytescale_ext.plan.activation.load import LayerLoad, LayerSettings, Machine, cost_of_rates, full_load
from bytescale_ext.plan.activation.plan import ActivationPlan
from bytescale_ext.plan.activation.policies import make_plan
from bytescale_ext.plan.cost.model_shape import ModelShape
from bytescale_ext.plan.states.choice import (
    OptionForecast,
    StageProblem,
    StateChoice,
    StateProblem,
    all_options,
    choose_states,
    predict_option,
)
from bytescale_ext.plan.states.forecast import StateCase
from bytescale_ext.plan.states.step_time import StateOption
from bytescale_ext.plan.states.timeline import Speeds

SHAPE = ModelShape(4, 1024, 8, 8, 128, 4096, True, 8000)
PAGE_BYTES = 1 << 22
SPEEDS = Speeds(55e9, 20e9, 6e9, 3e9)
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)


def stage(
    num_layers: int, number: int, last: int, tokens: int, policy: str = "auto", rate: float = 1.0
) -> StageProblem:
    """Return a stage of a model on a device of ``rate`` times 400 TFLOP/s."""
    cost = cost_of_rates(SHAPE, *(rate * each for each in (400e12, 350e12, 300e12)))
    in_flight = last - number + 1
    how = LayerSettings(num_layers, 2 * (in_flight == 1), in_flight, loss_tokens=512 if number == last else 0)
    case = StateCase(SHAPE.part(num_layers), 1, number == 0, number == last, 2, 1, PAGE_BYTES)
    return StageProblem(case, full_load(cost, tokens, tokens, how), partial(make_plan, policy), 1e-3)


def problem(seed: int) -> StateProblem:
    dice = random.Random(seed)
    num_stages, tokens = dice.choice((1, 1, 2)), dice.choice((1024, 8192, 65536))
    rate = dice.choice((0.05, 1.0))
    stages = tuple(
        stage(dice.choice((2, 4)), number, num_stages - 1, tokens, rate=rate) for number in range(num_stages)
    )
    states = max(one.case.resident_bytes for one in stages)
    kept = max(one.load.times_held * one.load.num_layers * one.load.bytes_of() + one.load.head_bytes for one in stages)
    machine = Machine(
        dice.uniform(0.1, 1.3) * states + dice.uniform(0.2, 1.2) * kept,
        dice.uniform(0.2, 1.8) * states + dice.uniform(0, 1) * kept,
        dice.choice((5e9, 55e9)),
    )
    has_disk = dice.random() < 0.4
    speeds = replace(SPEEDS, link_bytes_per_second=machine.link_bytes_per_second)
    options = all_options(dice.choice(((1,), (1, 2, 3), (1, 3))), has_disk)
    return StateProblem(
        stages, machine, speeds, 3e12, 1e12 * has_disk, dice.choice((1, 4, 64)), dice.choice((1, 2)), options
    )


def plans(num_layers: int) -> Iterator[ActivationPlan]:
    """Yield plans of a grid."""
    yield ActivationPlan("none")
    for swap, recompute, input_swap in itertools.product(SHARES, SHARES, SHARES):
        if swap + recompute <= 1:
            yield from (
                ActivationPlan("any", swap, recompute, input_swap, is_rebuilt, resident)
                for is_rebuilt in (False, True) for resident in range(min(2, num_layers), num_layers + 1)
            )  # fmt: skip


def pass_seconds(
    option: StateOption, one: StageProblem, machine: Machine, speeds: Speeds
) -> tuple[float, float, float]:
    """Return the least time of both passes of a layer with paged states, and the seconds per activation byte."""
    matrices = 2 * 4 * SHAPE.hidden**2 + 3 * SHAPE.hidden * SHAPE.ffn_hidden
    count = (
        matrices - 4 * SHAPE.hidden**2 + 2 * SHAPE.hidden
    )  # the model has as many key and value heads as query heads
    assert one.case.num_parameters - one.case.with_layers(0).num_parameters == count * one.case.shape.num_layers
    fetched = 2 * count / machine.link_bytes_per_second if option.stage == 3 else 0.0
    sums = max(2 * count / machine.link_bytes_per_second, 10 * count / speeds.adam_bytes_per_second)
    forward, backward = one.load.forward_seconds, one.load.backward_seconds
    if option.window_layers == 1:
        forward, backward = forward + fetched, backward + fetched
    forward, backward = max(forward, fetched), max(backward, fetched, sums if option.stage > 1 else 0.0)
    return forward, backward, 1 / (machine.link_bytes_per_second * max(1e-3, 1 - fetched / backward))


def layers_seconds(plan: ActivationPlan, load: LayerLoad, times: tuple[float, float, float], machine: Machine) -> float:
    """Return the time of a micro-batch, computed layer by layer."""
    forward, backward, per_byte = times
    resident = load.num_layers if plan.is_off else min(plan.resident_layers, load.num_layers)
    swapped = load.num_tokens * sum(tensor.bytes_per_token * plan.shares(tensor)[0] for tensor in load.tensors)
    rebuilt = sum(
        share * load.rebuild_seconds(tensor, machine) for tensor in load.tensors if (share := plan.shares(tensor)[2])
    )
    total = 0.0
    for layer in range(load.num_layers):
        is_planned = layer < load.num_layers - resident
        total += max(forward, swapped * per_byte * is_planned)
        total += max(backward + rebuilt * is_planned, swapped * per_byte * is_planned)
    alone = resident == 0 and load.in_flight == 1
    return total + swapped * per_byte * alone


def least_by_grid(what: StateProblem) -> float:
    """Return the least time of all options, with any plan of the grid on each stage; infinite if none fits."""
    best = float("inf")
    for option in what.options:
        cases = [one.case for one in what.stages]
        left = Machine(
            what.machine.device_bytes - max(option.device_bytes(case) for case in cases),
            what.machine.host_bytes - max(option.host_bytes(case) for case in cases),
            what.machine.link_bytes_per_second,
        )
        builds = max(option.of(case).build_bytes for case in cases) * (option.stage > 0)
        if builds > what.machine.device_bytes or option.disk_share * 1e-9 > what.disk_bytes:
            continue
        slowest = 0.0
        for one in what.stages:
            times = pass_seconds(option, one, what.machine, what.speeds)
            fitting = (
                layers_seconds(plan, one.load, times, what.machine)
                for plan in plans(one.load.num_layers)
                if forecast(plan, one.load, left).fits(left)
            )
            ends = one.case.with_layers(0).num_parameters * 2 / what.machine.link_bytes_per_second * (option.stage > 1)
            slowest = max(slowest, min(fitting, default=float("inf")) + one.end_seconds + ends)
        update = what.update_seconds(option)
        best = min(best, (what.num_microbatches + len(what.stages) - 1) * slowest + update)
    return best


@cache
def chosen(what: StateProblem) -> StateChoice | None:
    try:
        return choose_states(what)
    except ValueError:
        return None


def seconds(what: StateProblem) -> float:
    found = chosen(what)
    return found.chosen.seconds if found else float("inf")


@cache
def problems() -> tuple[StateProblem, ...]:
    return tuple(map(problem, range(14)))


@pytest.mark.full
@pytest.mark.slow
def test_no_option_with_any_plan_of_a_grid_is_faster() -> None:
    """If any option with any pair of shares fits, the choice fits too and is at least as fast."""
    fitted, kinds = 0, set()
    for what in problems():
        found, least = chosen(what), least_by_grid(what)
        assert found is not None or least == float("inf")
        if found is not None:
            assert found.chosen.seconds <= least * (1 + 1e-9)
            fitted += least < float("inf")
            kinds.add(found.chosen.option.stage)
    assert fitted > 6
    assert len(kinds) >= 3, kinds


@pytest.mark.slow
@pytest.mark.parametrize("name", ["device_bytes", "host_bytes"])
def test_more_memory_is_never_slower(name: str) -> None:
    changed = 0
    for what in problems():
        times = [
            seconds(replace(what, machine=replace(what.machine, **{name: factor * getattr(what.machine, name)})))
            for factor in (1.0, 1.3, 3.0)
        ]
        for less, more in itertools.pairwise(times):
            assert more <= less * (1 + 1e-9), (name, times)
        changed += times[-1] < times[0]
    assert changed >= 3


@pytest.mark.slow
def test_what_fits_resident_stays_resident() -> None:
    """With memory for all states and activations, resident states are fastest. With less, the reason names the need."""
    for what in problems()[:5]:
        ample = replace(what, machine=replace(what.machine, device_bytes=1e12))
        found = choose_states(ample)
        assert found.chosen.option == StateOption()
        assert found.resident_bytes == 0
        assert [one.seconds for one in found.others] == sorted(one.seconds for one in found.others)
    paged = [found for what in problems() if (found := chosen(what)) and found.resident_bytes]
    assert paged
    for found in paged:
        assert re.search(r"\(resident takes \d+\.\d{3} GB of device memory\): stage \d", found.described())


@pytest.mark.slow
def test_the_least_device_memory_of_resident_states() -> None:
    for what in problems():
        found = chosen(what)
        if found is None or not found.resident_bytes:
            continue
        for factor, fits in ((1.001, True), (0.999, False)):
            sized = replace(what, machine=replace(what.machine, device_bytes=factor * found.resident_bytes))
            assert (predict_option(sized, StateOption()) is not None) is fits


@pytest.mark.slow
def test_where_nothing_fits_the_least_that_would_is_named() -> None:
    what = replace(problem(0), machine=Machine(1e6, 1e6, 55e9))
    with pytest.raises(ValueError, match=r"do not fit in 0\.001 GB of device memory") as caught:
        choose_states(what)
    least = re.search(r"give --device-memory-gb ([\d.]+)", str(caught.value))
    assert least
    gigabytes = float(least[1])
    choose_states(replace(what, machine=replace(what.machine, device_bytes=1e9 * gigabytes)))
    assert chosen(replace(what, machine=replace(what.machine, device_bytes=0.999e9 * gigabytes))) is None
    slightly_less = replace(what, machine=Machine(0.9e9 * gigabytes, 1e6, 55e9))
    with pytest.raises(ValueError, match=r"or --host-memory-gb [\d.]+, or fewer tokens") as caught:
        choose_states(slightly_less)
    host = re.search(r"--host-memory-gb ([\d.]+)", str(caught.value))
    assert host
    choose_states(replace(slightly_less, machine=replace(slightly_less.machine, host_bytes=1e9 * float(host[1]))))


def test_bytes_are_within_the_budgets() -> None:
    for what in problems():
        found = chosen(what)
        for one in (found.chosen, *found.others) if found else ():
            assert one.state_bytes + one.activation_bytes <= what.machine.device_bytes * (1 + 1e-9)
            assert one.state_host_bytes + one.activation_host_bytes <= what.machine.host_bytes * (1 + 1e-9)
            assert one.update_seconds < one.seconds


def test_keys_of_slices_take_host_memory_of_activations() -> None:
    what = replace(problem(0), machine=Machine(1e12, 1e9, 55e9))
    with_keys = replace(what, stages=tuple(replace(one, key_bytes=1.1e9) for one in what.stages))
    assert chosen(what) is not None
    assert chosen(with_keys) is None


def test_a_choice_is_two_lines() -> None:
    one = OptionForecast(StateOption(), 2.0, 0.25, 10e9, 0.0, 5e9, 0.0, 1.0)
    other = replace(one, option=StateOption(3, 1, 0.5), seconds=3.0)
    assert StateChoice(one, (other,)).described().splitlines() == [
        "> bytescale: states auto (the least predicted time): resident: 2 s a step (0.25 s of it the update), "
        "device 10 GB and activations 5, host 0 GB and activations 0",
        "> bytescale: states auto, what else fits: stage 3 with 1 layer on the device, 50% of the pages on a disk 3 s",
    ]
    assert StateChoice(one, ()).described().endswith("what else fits: nothing")
