"""Memory and copies of paged states, by formula."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bytescale_ext.plan.cost.model_shape import LLAMA_7B
from bytescale_ext.plan.memory.model_states import num_parameters, state_bytes
from bytescale_ext.plan.states.forecast import Room, StateCase, Tier, most_layers
from bytescale_ext.plan.states.moves import StateTraffic
from bytescale_ext.plan.states.pages import NUM_GRADIENT_SLOTS
from bytescale_ext.plan.states.tiers import FileLayout, least_host_bytes, pages_on_disk, tiered_host_bytes

MIB = 1 << 20
CASE = StateCase(LLAMA_7B, 1, True, True, 2, 1, 4 * MIB)


def test_a_7b_model_in_bf16() -> None:
    """12 of the 18 bytes per parameter leave the device."""
    parameters = num_parameters(LLAMA_7B)
    assert CASE.num_parameters == parameters
    assert CASE.resident_bytes == state_bytes(LLAMA_7B) == 18 * parameters
    assert CASE.paged_bytes == 6 * parameters
    spare = (3 * 2 + 4) * 4 * MIB  # the last page of two groups in three planes, and the buffers
    assert 0 <= CASE.host_bytes - 12 * parameters <= spare
    assert CASE.traffic() == StateTraffic(4 * parameters, 2 * parameters)


@pytest.mark.parametrize("changes", [{}, {"element_bytes": 4}, {"optimizer_ranks": 3}, {"page_bytes": 12 * MIB}])
def test_host_memory_is_that_of_the_table(changes: dict[str, int]) -> None:
    case = replace(CASE.with_layers(2), **changes)
    assert case.host_bytes == case.table.host_bytes


def test_the_largest_model() -> None:
    """With enough host memory the device stores 18 / 6 times as many parameters; otherwise the host is the limit."""
    resident = most_layers(CASE, Room(140e9, 0.0), Tier.DEVICE)
    paged = most_layers(CASE, Room(140e9, 1e12), Tier.HOST)
    assert CASE.with_layers(resident).resident_bytes <= 140e9 < CASE.with_layers(resident + 1).resident_bytes
    assert CASE.with_layers(paged).paged_bytes <= 140e9 < CASE.with_layers(paged + 1).paged_bytes
    ratio = CASE.with_layers(paged).num_parameters / CASE.with_layers(resident).num_parameters
    assert ratio == pytest.approx(3.0, rel=0.03)
    limited = most_layers(CASE, Room(140e9, 100e9), Tier.HOST)
    assert CASE.with_layers(limited).host_bytes <= 100e9 < CASE.with_layers(limited + 1).host_bytes
    assert limited < paged


@pytest.mark.parametrize("changes", [{}, {"element_bytes": 4}, {"optimizer_ranks": 3}])
def test_the_file_is_that_of_the_table(changes: dict[str, int]) -> None:
    case = replace(CASE.with_layers(2), **changes)
    assert case.file_bytes == FileLayout.of(case.table).num_bytes
    assert case.least_host_bytes == least_host_bytes(case.page_bytes, case.table.num_copies > 0)
    everywhere = pages_on_disk(case.table, case.least_host_bytes)
    assert tiered_host_bytes(case.table, everywhere) == case.least_host_bytes
    assert case.traffic(everywhere).on_disk == case.table.num_host_pages * case.page_bytes


def test_a_disk_takes_what_the_host_has_no_room_for() -> None:
    """With a disk the device is the limit again.

    Without disk space, or host memory for pages in flight, nothing is gained.
    """
    host = most_layers(CASE, Room(140e9, 100e9), Tier.HOST)
    disk = most_layers(CASE, Room(140e9, 100e9, 1e12), Tier.DISK)
    assert disk == most_layers(CASE, Room(140e9, 1e12), Tier.HOST) > host
    limited = most_layers(CASE, Room(140e9, 100e9, 300e9), Tier.DISK)
    assert CASE.with_layers(limited).file_bytes <= 300e9 < CASE.with_layers(limited + 1).file_bytes
    assert most_layers(CASE, Room(140e9, 1e6, 1e12), Tier.DISK) == 0
    assert most_layers(CASE, Room(140e9, 100e9, 1e12), Tier.HOST) == host


def test_what_each_stage_leaves_on_the_device() -> None:
    """Gradients of 4 bytes leave in stage 2.

    In stage 3 only a window of layers, and parameters outside layers, stay.
    """
    parameters = CASE.num_parameters
    second, third = replace(CASE, stage=2), replace(CASE, stage=3, window_layers=3)
    assert second.paged_bytes == 2 * parameters
    assert third.paged_bytes == 2 * CASE.with_layers(3).num_parameters
    assert replace(third, window_layers=100).paged_bytes == second.paged_bytes
    slots = NUM_GRADIENT_SLOTS * 4 * MIB
    assert second.host_bytes == CASE.host_bytes + int(4 * parameters) + slots
    assert third.host_bytes == CASE.host_bytes + int(6 * parameters) + slots
    assert third.least_host_bytes == CASE.least_host_bytes + int(6 * parameters) + slots
    assert replace(third, node_ranks=8).host_bytes == CASE.host_bytes + int(6 * parameters / 8) + slots
    assert second.resident_bytes == CASE.resident_bytes


def test_what_a_step_copies_in_each_stage() -> None:
    """Gradients are copied once per micro-batch, in stage 3 parameters twice.

    The update copies nothing over the link.
    """
    parameters = CASE.num_parameters
    assert CASE.link_bytes(5) == StateTraffic(4 * parameters, 2 * parameters)
    assert replace(CASE, stage=2).link_bytes(5) == StateTraffic(5 * 2 * int(parameters), 2 * parameters)
    third = replace(CASE, stage=3, window_layers=2)
    of_layers = CASE.num_parameters - CASE.with_layers(0).num_parameters
    assert third.link_bytes(5).fetched == 5 * 2 * int(parameters)
    ends = CASE.with_layers(0).num_parameters
    assert third.link_bytes(5).returned == pytest.approx(2 * (2 * 5 * of_layers + ends))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_largest_model_of_each_stage(stage: int) -> None:
    """The memory that Megatron needs to build the model is a limit too."""
    case = replace(CASE, stage=stage)
    layers = most_layers(case, Room(140e9, 1e13), Tier.HOST)
    assert case.with_layers(layers).paged_bytes <= 140e9
    assert case.with_layers(layers).build_bytes <= 140e9
    more = case.with_layers(layers + 1)
    assert max(more.paged_bytes, more.build_bytes) > 140e9


def test_what_the_build_holds() -> None:
    """The build needs parameters and, in stage 1, gradients; with shared states also a copy of the parameters."""
    assert CASE.build_bytes == 6 * CASE.num_parameters
    assert replace(CASE, optimizer_ranks=2).build_bytes == 8 * CASE.num_parameters
    assert replace(CASE, element_bytes=4, optimizer_ranks=2).build_bytes == 12 * CASE.num_parameters
    assert replace(CASE, stage=2, optimizer_ranks=2).build_bytes == 2 * CASE.num_parameters
    assert replace(CASE, stage=3).build_bytes == 2 * CASE.num_parameters
