from __future__ import annotations

import pytest

from bytescale_ext.plan.activation.forecast import DeviceNeed
from bytescale_ext.plan.activation.load import HeldSlices, LayerSettings, cost_of_rates, layer_load
from bytescale_ext.plan.cost.model_shape import LLAMA_7B
from tests.plan.activation.random_loads import load_of


def test_device_memory_at_its_two_peaks() -> None:
    """By hand, in layers: 2 of 8 layers are resident, and the others keep a quarter."""
    load = load_of(65536, 8)
    layer, edge = load.bytes_of(), max(load.working_bytes, load.head_bytes)
    need = DeviceNeed.of(load, 2, moves=True)
    assert need.device_bytes(0.25 * layer) == pytest.approx(2 * layer + 6 * 0.25 * layer + edge)
    alone = DeviceNeed.of(load, 0, moves=False)
    in_backward = layer + 7 * 0.25 * layer + load.working_bytes
    assert alone.device_bytes(0.25 * layer) == pytest.approx(max(in_backward, 8 * 0.25 * layer + edge))
    for one in (need, alone, DeviceNeed.of(load, 3, moves=True, copies=5e9)):
        for kept in (0.0, 0.1 * layer, 0.9 * layer):
            assert one.most_kept(one.device_bytes(kept)) == pytest.approx(kept, abs=1.0)
        assert one.most_kept(0.5 * one.device_bytes(0.0)) < 0


def test_what_is_gathered_and_messages_are_beside_all_passes() -> None:
    """With 16 bits: a hidden state that two ranks gather and, with virtual stages, four messages of half a state."""
    cost = cost_of_rates(LLAMA_7B, 1e12, 1e12, 1e12, tensor_parallel=2)

    def need(num_layers: int, **how: bool) -> float:
        slices = (HeldSlices(2048, 8192, 0.0),)
        load = layer_load(cost, 8192, LayerSettings(num_layers, slices=slices, **how))  # type: ignore[arg-type]
        return DeviceNeed.of(load, 0, moves=False).device_bytes(0.0)

    shared = need(8, sequence_parallel=True, virtual=True) - need(8, sequence_parallel=True)
    assert shared == pytest.approx(2048 * 4 * 4096)
    assert need(8, virtual=True) - need(8) == pytest.approx(2048 * 4 * 2 * 4096)
    whole, part = (
        layer_load(cost, 8192, LayerSettings(8)),
        layer_load(cost, 8192, LayerSettings(8, 2, 1, 2, True)),
    )
    assert (whole.beside_bytes, part.beside_bytes) == (0, 2 * 4096)
