"""What paging takes and saves, by formula."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bytescale_ext.plan.cost.model_shape import LLAMA_7B
from bytescale_ext.plan.memory.model_states import num_parameters, state_bytes
from bytescale_ext.plan.states.forecast import Room, StateCase, Tier, most_layers
from bytescale_ext.plan.states.moves import Traffic
from bytescale_ext.plan.states.tiers import FileLayout, least_host_bytes, pages_on_disk, tiered_host_bytes

MIB = 1 << 20
CASE = StateCase(LLAMA_7B, 1, True, True, 2, 1, 4 * MIB)


def test_a_7b_model_in_bf16() -> None:
    """Of 18 bytes a parameter 12 leave the device."""
    parameters = num_parameters(LLAMA_7B)
    assert CASE.num_parameters == parameters
    assert CASE.resident_bytes == state_bytes(LLAMA_7B) == 18 * parameters
    assert CASE.paged_bytes == 6 * parameters
    spare = (3 * 2 + 4) * 4 * MIB  # the last page of two groups in three planes, and the buffers
    assert 0 <= CASE.host_bytes - 12 * parameters <= spare
    assert CASE.traffic() == Traffic(4 * parameters, 2 * parameters)


def test_float32_parameters_stay_on_the_device() -> None:
    case = replace(CASE, element_bytes=4)
    assert case.resident_bytes == 16 * case.num_parameters
    assert case.paged_bytes == 8 * case.num_parameters
    assert case.host_bytes == pytest.approx(8 * case.num_parameters, rel=0.01)
    assert case.traffic() == Traffic(8 * case.num_parameters, 4 * case.num_parameters)


@pytest.mark.parametrize("changes", [{}, {"element_bytes": 4}, {"optimizer_ranks": 3}, {"page_bytes": 12 * MIB}])
def test_host_memory_is_that_of_the_table(changes: dict[str, int]) -> None:
    case = replace(CASE.with_layers(2), **changes)
    assert case.host_bytes == case.table.host_bytes


def test_ranks_share_pages() -> None:
    shared = replace(CASE, optimizer_ranks=4)
    assert shared.paged_bytes == CASE.paged_bytes
    assert shared.resident_bytes == pytest.approx((6 + 12 / 4) * CASE.num_parameters)
    assert shared.host_bytes == pytest.approx(CASE.host_bytes / 4, rel=0.01)


def test_the_largest_model() -> None:
    """With enough host memory the device holds 18 / 6 times as many parameters; else the host is the limit."""
    resident = most_layers(CASE, Room(140e9, 0.0), Tier.DEVICE)
    paged = most_layers(CASE, Room(140e9, 1e12), Tier.HOST)
    assert CASE.with_layers(resident).resident_bytes <= 140e9 < CASE.with_layers(resident + 1).resident_bytes
    assert CASE.with_layers(paged).paged_bytes <= 140e9 < CASE.with_layers(paged + 1).paged_bytes
    ratio = CASE.with_layers(paged).num_parameters / CASE.with_layers(resident).num_parameters
    assert ratio == pytest.approx(3.0, rel=0.03)
    limited = most_layers(CASE, Room(140e9, 100e9), Tier.HOST)
    assert CASE.with_layers(limited).host_bytes <= 100e9 < CASE.with_layers(limited + 1).host_bytes
    assert limited < paged


def test_no_layer_fits() -> None:
    assert most_layers(CASE, Room(1e9, 1e12), Tier.DEVICE) == 0
    assert most_layers(CASE, Room(1e12, 1e9), Tier.HOST) == 0


@pytest.mark.parametrize("changes", [{}, {"element_bytes": 4}, {"optimizer_ranks": 3}])
def test_the_file_is_that_of_the_table(changes: dict[str, int]) -> None:
    case = replace(CASE.with_layers(2), **changes)
    assert case.file_bytes == FileLayout.of(case.table).num_bytes
    assert case.least_host_bytes == least_host_bytes(case.page_bytes, case.table.num_copies > 0)
    everywhere = pages_on_disk(case.table, case.least_host_bytes)
    assert tiered_host_bytes(case.table, everywhere) == case.least_host_bytes
    assert case.traffic(everywhere).on_disk == case.table.num_host_pages * case.page_bytes


def test_a_disk_takes_what_the_host_has_no_room_for() -> None:
    """The device is the limit again; without space of the disk, or of the host for pages under way, nothing is won."""
    host = most_layers(CASE, Room(140e9, 100e9), Tier.HOST)
    disk = most_layers(CASE, Room(140e9, 100e9, 1e12), Tier.DISK)
    assert disk == most_layers(CASE, Room(140e9, 1e12), Tier.HOST) > host
    limited = most_layers(CASE, Room(140e9, 100e9, 300e9), Tier.DISK)
    assert CASE.with_layers(limited).file_bytes <= 300e9 < CASE.with_layers(limited + 1).file_bytes
    assert most_layers(CASE, Room(140e9, 1e6, 1e12), Tier.DISK) == 0
    assert most_layers(CASE, Room(140e9, 100e9, 1e12), Tier.HOST) == host
