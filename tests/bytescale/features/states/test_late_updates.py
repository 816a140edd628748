"""The staleness of steps is counted before their update, and told at each log interval."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron.bytescale.features.states import late_updates as module
from tests.bytescale.runtimes import runtime_of


class Training:
    """Keeps what wraps the end of a step."""

    def __init__(self) -> None:
        self.finalize: Any = lambda *args: ("gradients", args)

    def wrap_finalize(self, wrap: Any) -> Training:
        self.finalize = wrap(self.finalize)
        return self


def test_the_log_has_the_mean_and_the_most(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    counter = SimpleNamespace(curr_iteration=0)
    monkeypatch.setattr("megatron.training.get_args", lambda: counter)
    monkeypatch.setattr(module, "print_rank_last", lines.append)
    monkeypatch.setattr(module, "write_scalars", lambda scalars, step: lines.append(f"{step} {scalars}"))
    late = SimpleNamespace(missing=0, wait_seconds=0.0)
    runtime = runtime_of(log_interval=2, late_updates=late)
    training: Any = module.tell_staleness(Training(), runtime)  # type: ignore[arg-type]
    counted = []
    for step, missing in enumerate([0, 1, 2, 3]):
        counter.curr_iteration, late.missing = step, missing
        assert training.finalize("model") == ("gradients", ("model",))
        counted.append(runtime.step.stale_steps)
        late.wait_seconds += 0.25
    assert counted == [0, 1, 2, 3]
    told = "> bytescale: parameters lacked the gradients of {} steps, {} at most; {} ms of a step went to waiting"
    assert lines[0].startswith(told.format("0.50", 1, "125.0"))
    assert lines[1] == "2 {'states/stale steps': 0.5, 'states/most stale steps': 1, 'states/waited ms': 125.0}"
    assert lines[2].startswith(told.format("2.50", 3, "250.0"))
