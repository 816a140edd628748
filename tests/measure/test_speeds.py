"""Speeds measured at the start: timed work and the resulting rates, with a clock of the test."""

from __future__ import annotations

from itertools import count

import pytest
import torch

from bytescale_ext.attention.kernels.table import choose_kernel
from bytescale_ext.measure import speeds
from bytescale_ext.measure.speeds import (
    REPEATS,
    Timer,
    copy_seconds_per_byte,
    kind_seconds,
    product_flops,
    rates_of,
)
from bytescale_ext.plan.cost.model_shape import ModelShape

SHAPE = ModelShape(4, 64, 4, 2, 16, 96, True, 128)
CPU = torch.device("cpu")


class Clock:
    """Clock that work advances."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_fastest_run_counts_after_one_to_warm_up() -> None:
    clock, takes = Clock(), iter([9.0, 3.0, 2.0, 4.0, *[5.0] * 20])
    waits = count()

    def work() -> None:
        clock.now += next(takes)

    timer = Timer(clock, lambda: next(waits) and None, budget=100.0)
    assert timer.fastest(work) == 2.0
    assert next(waits) == 2 * REPEATS
    assert timer.elapsed == 9 + 3 + 2 + 4 + 5 * (REPEATS - 3)


def test_nothing_is_repeated_after_the_budget_and_each_runs_twice() -> None:
    clock, runs = Clock(), []

    def work() -> None:
        clock.now += 1.0
        runs.append(clock.now)

    timer = Timer(clock, budget=2.5)
    assert timer.fastest(work) == 1.0
    assert len(runs) == 3
    assert timer.fastest(work) == 1.0
    assert len(runs) == 5


def test_copies_go_both_ways_and_the_slower_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Timer, "fastest", lambda timer, run: (run(), next(seconds))[1])
    seconds = iter([2.0, 6.0])
    host = torch.ones(30, dtype=torch.uint8)
    assert copy_seconds_per_byte(host, CPU, Timer()) == 6.0 / 30
    monkeypatch.setattr(speeds, "LINK_BYTES", 10)
    seconds = iter([2.0, 1.0])
    assert copy_seconds_per_byte(host, CPU, Timer()) == 2.0 / 10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_is_timed_without_touching_random_states(dtype: torch.dtype) -> None:
    ticks = count()
    kernel = choose_kernel(CPU, dtype, SHAPE.head_dim)[0]
    before = torch.get_rng_state()
    timer = Timer(lambda: float(next(ticks)), budget=0.0)
    with torch.no_grad():
        found = kind_seconds(SHAPE, 2, kernel, torch.empty(0, dtype=dtype), 32, timer)
    assert found == (1.0, 1.0, 1.0, 1.0)
    assert torch.equal(torch.get_rng_state(), before)


def test_rates_are_those_of_the_growth() -> None:
    lengths, tokens = (100, 300), (100.0, 300.0)
    products, attention = product_flops(SHAPE), 2.0 * SHAPE.head_dim * SHAPE.num_heads
    seconds = [
        (5 + products * s / 1e6, 5 + 2 * products * s / 1e6, 7 + attention * s * s / 2e6, 2.5 * attention * s * s / 4e6)
        for s in tokens
    ]
    rates = rates_of(SHAPE, 1, lengths, seconds)
    assert rates.products == pytest.approx(1e6)
    assert rates.attention_forward == pytest.approx(2e6)
    assert rates.attention_backward == pytest.approx(4e6)
    noisy = [(1.0, 1.0, 1.0, 1.0), (0.5, 0.5, 0.5, 0.5)]  # the longer copy was faster, so its own rate
    rates = rates_of(SHAPE, 1, lengths, noisy)
    assert rates.products == pytest.approx(3 * products * 300 / 1.0)
    assert rates.attention_forward == pytest.approx(attention * 300 * 300 / 0.5)


def test_a_run_ends_with_the_work_that_it_starts_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append("wait"))
    for kind in ("cpu", "cuda"):
        assert speeds.run_seconds(lambda: waits.append("run"), torch.device(kind)) >= 0
    assert waits == ["run", "run", "wait"]
