"""The clock of a step on a GPU."""

from __future__ import annotations

import pytest
import torch

from bytescale_ext.measure.metrics import StepClock

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_a_traced_step_is_timed_by_events() -> None:
    """No mark waits for the device; the phases follow each other without gaps."""
    x = torch.randn(512, 512, device="cuda")
    clock = StepClock(on_cuda=True)
    for _ in range(2):
        clock.begin(traced=True)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for kind in ("forward", "backward", "end"):
                clock.mark(kind, 0)
                for _ in range(20):
                    x = torch.tanh(x @ x)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        phases = clock.phases(1, 0, (), ())
        assert [phase.kind for phase in phases] == ["wait", "forward", "backward"]
        assert all(phase.stop >= phase.start for phase in phases)
        assert [phase.stop for phase in phases[:-1]] == [phase.start for phase in phases[1:]]
        assert clock.work_seconds() == pytest.approx(phases[-1].stop - phases[1].start, abs=1e-3)
