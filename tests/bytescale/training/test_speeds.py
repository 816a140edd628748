"""Speeds measured at the start: equal on all ranks, from the slowest rank, without any effect on training."""

from __future__ import annotations

import contextlib
import io
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bytescale_ext.config.memory.activations import ActivationConfig
from bytescale_ext.config.run import RunConfig
from bytescale_ext.measure import speeds as measured_speeds
from bytescale_ext.measure.speeds import Rates
from bytescale_ext.plan.activation.load import cost_of_rates
from megatron.bytescale.features.activations.build import make_store
from megatron.bytescale.runtime import Runtime
from megatron.bytescale.training import speeds
from megatron.bytescale.training.speeds import measure_speeds
from tests.harness import run_ranks


def run_of(*words: str, **settings: Any) -> RunConfig:
    from megatron.bytescale.arguments.resolve import resolve
    from tests.bytescale.features.activations.test_flags import MEMO, parsed

    run = resolve(parsed(*MEMO, *words, **settings))
    return replace(run, process=replace(run.process, dtype=torch.float32))


def measured(rank: int, world: int, words: tuple[str, ...], factors: tuple[float, ...]) -> tuple[str, Any]:
    """Return the output and the configuration of a rank, whose clock runs ``factors[rank]`` times as fast."""
    ticks = [0.0]

    def clock() -> float:
        ticks[0] += 1e-3 * factors[rank]
        return ticks[0]

    measured_speeds.BUDGET_SECONDS = 0.0
    runtime = Runtime.of(run_of(*words))
    runtime.add_parts(activations=make_store(runtime.run))
    model = torch.nn.Linear(2, 2)
    states = torch.get_rng_state()
    with contextlib.redirect_stdout(io.StringIO()) as text:
        assert measure_speeds(runtime, [model], clock) == [model]
    assert torch.equal(torch.get_rng_state(), states)
    assert all(parameter.grad is None for parameter in model.parameters())
    config = runtime.run.get(ActivationConfig)
    assert runtime.parts.activations.plan == config.plan(config.largest)
    assert config.measures == ()
    return text.getvalue(), config


@pytest.mark.full
@pytest.mark.ranks
def test_all_ranks_plan_with_the_speeds_of_the_slowest() -> None:
    (text, first), (other_text, second) = run_ranks(measured, 2, ("--host-memory-gb", "1"), (1.0, 3.0))
    assert first == second
    assert other_text == ""
    alone, plan = text.splitlines()
    assert alone.startswith("> bytescale: measured at start in 0.")
    assert "GB/s to host memory" in alone
    assert "TFLOP/s in matrix products" in alone
    assert plan.startswith("> bytescale: activations memo: ")
    # One tick of rank 1's clock, 3 ms, passes between its two readings in each run.
    assert first.machine.link_bytes_per_second == pytest.approx(measured_speeds.LINK_BYTES / 3e-3)
    assert first.cost.source == "measured at start"
    assert first.cost.forward.a > 0 < first.cost.forward.b


@pytest.mark.ranks
def test_what_is_given_is_not_measured() -> None:
    ((text, config),) = run_ranks(measured, 1, ("--link-gb-per-second", "20"), (1.0,))
    assert config.machine.link_bytes_per_second == 20e9
    assert "GB/s to host memory" not in text
    assert config.cost.source == "measured at start"


def test_speeds_that_do_not_fit_are_not_used(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runtime = Runtime.of(run_of())
    runtime.add_parts(activations=SimpleNamespace(plan=None))
    before = runtime.run.get(ActivationConfig)
    monkeypatch.setattr(speeds.dist, "barrier", lambda: None)
    monkeypatch.setattr(speeds, "agreed_speeds", lambda *_: (1e9, Rates(1e12, 1e12, 1e12), 0.0))
    monkeypatch.setattr(speeds, "_any_rank", lambda is_so, device: is_so)
    monkeypatch.setattr(speeds, "print_rank_0", print)

    def refuse(*_: Any) -> ActivationConfig:
        raise ValueError("too small")

    monkeypatch.setattr(ActivationConfig, "with_speeds", refuse)
    measure_speeds(runtime, [])
    assert runtime.run.get(ActivationConfig) == replace(before, measures=())
    text = capsys.readouterr().out
    assert "measured speeds are not used, because they do not fit: too small" in text
    assert "assumed, not measured" in text


def test_measured_speeds_change_the_plan_and_nothing_else() -> None:
    config = run_of().get(ActivationConfig)
    slow = config.with_speeds(cost_of_rates(config.cost.shape, 650e12, 600e12, 500e12), 5e9)
    assert slow.machine.link_bytes_per_second == 5e9
    assert slow.plan(slow.largest).swap < config.plan(config.largest).swap
    assert (slow.assumed, slow.measures) == ("", ())
    assert slow.layers == config.layers


def test_measured_collectives_count() -> None:
    shape = run_of().shape
    assumed, measured_cost = (cost_of_rates(shape, 1e12, 1e12, 1e12, 2, collective=one) for one in (None, 1e-9))
    assert measured_cost.collective == 1e-9
    assert measured_cost.forward.b > assumed.forward.b
