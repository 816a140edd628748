from __future__ import annotations

from bytescale_ext.plan.search.strategy import BLOCK, FULL, PRICED, Strategy
from megatron.bytescale.cli.search.choices import CHOICES, DECIDED


def test_every_flag_of_a_strategy_is_decided() -> None:
    strategies = [
        Strategy(2, (3, 2), 64, chooses_slices=True, shares_optimizer=True, loss_tokens=8, device_gb=1.0, host_gb=1.0),
        Strategy(1, (2, 2), 64, chunks=2, activations=FULL, expert_parallel=2),
        Strategy(1, (2,), 64, activations=PRICED, device_gb=1.0),
    ]
    flags = {word for one in strategies for word in one.flags() if word.startswith("--")}
    assert flags <= DECIDED
    assert CHOICES.keys() <= DECIDED


def test_values_differ_where_strategies_do() -> None:
    one = Strategy(1, (2, 2), 64)
    other = Strategy(
        2, (3, 1, 1), 128, shares_optimizer=True, chooses_slices=True, activations=PRICED, loss_tokens=8,
        expert_parallel=2,
    )  # fmt: skip
    for flag, value in CHOICES.items():
        if flag not in ("--num-virtual-stages-per-pipeline-rank", "--recompute-granularity", "--recompute-method"):
            assert value(one) != value(other), flag
    assert CHOICES["--num-virtual-stages-per-pipeline-rank"](Strategy(1, (2, 2), 64, chunks=2)) == "2"
    full, block = Strategy(1, (2,), 64, activations=FULL), Strategy(1, (2,), 64, activations=BLOCK, recomputed_layers=1)
    assert [CHOICES["--recompute-granularity"](one) for one in (full, block)] == ["full", "full"]
    assert [CHOICES["--recompute-method"](one) for one in (full, block, other)] == ["uniform", "block", "none"]
