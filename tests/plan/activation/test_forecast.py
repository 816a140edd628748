from __future__ import annotations

import pytest

from bytescale_ext.plan.activation.forecast import DeviceNeed
from tests.plan.activation.random_loads import load_of


def test_device_memory_at_its_two_peaks() -> None:
    """By hand, in layers: 8 of them, 2 resident; what is kept of the others is a quarter."""
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
