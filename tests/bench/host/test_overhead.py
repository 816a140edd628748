"""The host launches few more operators per layer than stock Megatron, whatever the machine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.harness import run_ranks

MOST_OPERATORS = {
    "local": 1.05, "slice of 4": 1.15, "slice of 16": 1.2, "ring of 4": 1.6, "ring of 8": 2.2,
    "swap": 2.3, "memo": 3.5, "priced": 2.7,
}  # fmt: skip
"""Most operators of each arm, including views, as multiples of stock Megatron's."""

MOST_LAUNCHED = {"local": 1.01, "slice of 4": 1.15, "slice of 16": 1.2, "ring of 8": 1.95, "swap": 1.4, "memo": 1.95}
"""Most operators that a device has to compute, as multiples of stock Megatron's."""


def counted(rank: int, world: int) -> dict[str, dict[str, Any]]:
    """Return the figures of all arms with four layers, by name."""
    from scripts.bench.host import overhead

    overhead.SHAPE = replace(overhead.SHAPE, num_layers=4)  # type: ignore[misc]
    figures = overhead.measure(overhead.arms_of(overhead.build_models()), rounds=0)
    return {arm.name: vars(arm) for arm in figures}


@pytest.mark.full
@pytest.mark.ranks
def test_operators_reads_and_losses_compare_with_stock_megatron() -> None:
    (arms,) = run_ranks(counted, 1, init_group=False)
    stock = arms["stock"]
    ratios = {name: arm["operators"] / stock["operators"] for name, arm in arms.items()}
    launched = {name: arm["launched"] / stock["launched"] for name, arm in arms.items()}
    assert all(ratios[name] <= most for name, most in MOST_OPERATORS.items()), ratios
    assert all(launched[name] <= most for name, most in MOST_LAUNCHED.items()), launched
    assert {arm["reads"] for arm in arms.values()} == {stock["reads"]}, "nothing else waits for the device"
    losses = {name: pytest.approx(stock["loss"], rel=1e-6) for name in arms}
    assert {name: arm["loss"] for name, arm in arms.items()} == losses
