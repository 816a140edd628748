"""Time of paged states in a step, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bytescale_ext.plan.activation.load import LayerSettings, cost_of_rates, layer_load
from bytescale_ext.plan.cost.model_shape import LLAMA_7B
from bytescale_ext.plan.states.forecast import StateCase
from bytescale_ext.plan.states.step_time import LayerTraffic, StateOption, update_seconds
from bytescale_ext.plan.states.timeline import Speeds, optimizer_step_seconds, time_moves

CASE = StateCase(LLAMA_7B.part(4), 1, True, True, 2, 1, 1 << 22)
LOAD = layer_load(cost_of_rates(LLAMA_7B, 600e12, 500e12, 400e12), 8192, LayerSettings(4))
SPEEDS = Speeds(50e9, 20e9, 6e9, 3e9)
LAYER = (CASE.num_parameters - CASE.with_layers(0).num_parameters) / 4
ENDS = CASE.with_layers(0).num_parameters
MEMORY = 3e12


def update(option: StateOption, case: StateCase = CASE, num_ranks: int = 1) -> float:
    return update_seconds(case, option, SPEEDS, MEMORY, num_ranks)


def test_resident_states_are_updated_in_device_memory() -> None:
    assert update(StateOption()) == pytest.approx(30 * CASE.num_parameters / MEMORY)
    shared = replace(CASE, optimizer_ranks=4)
    assert update(StateOption(), shared) == pytest.approx(30 / 4 * CASE.num_parameters / MEMORY)
    assert update(StateOption(), replace(CASE, element_bytes=4)) == pytest.approx(28 * CASE.num_parameters / MEMORY)


@pytest.mark.parametrize("disk_share", [0.0, 1.0])
def test_larger_pages_predict_the_same_update(disk_share: float) -> None:
    """The prediction is close to the replay of every page of the real size."""
    table = CASE.table
    on_disk = range(len(table.pages)) if disk_share else ()
    exact = optimizer_step_seconds(time_moves(table, 2, SPEEDS.of_stage(1), on_disk))
    assert update(StateOption(1, disk_share=disk_share)) == pytest.approx(exact, rel=0.02)


def test_the_update_of_stages_in_host_memory() -> None:
    """Gradients are read once, then read and written, and cross the link twice if ranks sum them."""
    second, third = update(StateOption(2)), update(StateOption(3))
    table = CASE.table
    moved = optimizer_step_seconds(time_moves(table, 2, SPEEDS.of_stage(2)))
    assert second == pytest.approx(moved + 12 * CASE.num_parameters / 20e9, rel=0.01)
    assert update(StateOption(2), num_ranks=2) - second == pytest.approx(8 * CASE.num_parameters / 50e9)
    in_host = optimizer_step_seconds(time_moves(table, 2, SPEEDS.of_stage(3)))
    assert third == pytest.approx(in_host + 12 * CASE.num_parameters / 20e9 + 2 * ENDS / 50e9, rel=0.01)


def test_the_traffic_of_a_layer() -> None:
    assert LayerTraffic.of(CASE, StateOption(1), SPEEDS) == LayerTraffic()
    second, third = (LayerTraffic.of(CASE, StateOption(stage), SPEEDS) for stage in (2, 3))
    assert second == LayerTraffic(0.0, 10 * LAYER / 20e9)  # summed by the processor more slowly than copied
    assert third == LayerTraffic(2 * LAYER / 50e9, 10 * LAYER / 20e9)
    slow_link = LayerTraffic.of(CASE, StateOption(2), replace(SPEEDS, link_bytes_per_second=1e9))
    assert slow_link.gradients == 2 * LAYER / 1e9


def test_computing_hides_traffic_or_waits_for_it() -> None:
    quick, slow = LayerTraffic(LOAD.forward_seconds / 2, LOAD.backward_seconds / 2), LayerTraffic(1.0, 2.0)
    assert quick.longer(LOAD, 2) == LOAD
    longer = slow.longer(LOAD, 2)
    assert (longer.forward_seconds, longer.backward_seconds) == (1.0, 2.0)
    alone = quick.longer(LOAD, 1)  # parameters of a single layer do not overlap
    assert alone.forward_seconds == 1.5 * LOAD.forward_seconds
    assert alone.backward_seconds == LOAD.backward_seconds + LOAD.forward_seconds / 2


def test_activations_get_what_parameters_leave_of_the_link() -> None:
    assert LayerTraffic().link_share(LOAD) == 1.0
    half = LayerTraffic(LOAD.backward_seconds / 2)
    assert half.link_share(LOAD) == 0.5
    full = LayerTraffic(2 * LOAD.backward_seconds)
    assert 0 < full.link_share(full.longer(LOAD, 2)) < 0.01


def test_the_memory_of_an_option() -> None:
    assert StateOption().device_bytes(CASE) == CASE.resident_bytes
    assert StateOption().host_bytes(CASE) == 0
    third = StateOption(3, 1)
    assert third.device_bytes(CASE) == replace(CASE, stage=3, window_layers=1).paged_bytes
    assert third.host_bytes(CASE) == replace(CASE, stage=3).host_bytes
    half = StateOption(1, disk_share=0.5).host_bytes(CASE)
    assert half == pytest.approx((CASE.host_bytes + CASE.least_host_bytes) / 2)
    assert StateOption(1, disk_share=1.0).host_bytes(CASE) == CASE.least_host_bytes
